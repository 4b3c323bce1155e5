"""The launcher's room: the fleet of agents, start proofs, recovery, and failures as errors."""
