"""The fabric check: a real transfer for each pair of nodes that will move KV, before weights load."""
