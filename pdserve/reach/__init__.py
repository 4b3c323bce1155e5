"""How a node is reached: local, ssh or Slurm; the protocol and the link to its agent."""
