"""The ways to a node: local, ssh or Slurm; the protocol and the link to its agent."""
