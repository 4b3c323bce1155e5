"""Nodes: placement, allocation, containers, how each is reached."""
