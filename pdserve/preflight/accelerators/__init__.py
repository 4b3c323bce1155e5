"""Checks of what GPUs need from a node beside being there: firmware, libraries for them, and modes in common."""
