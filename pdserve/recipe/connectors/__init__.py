"""KV connectors: one file each, and their registration in registry.py."""
