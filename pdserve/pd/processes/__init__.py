"""The proxy's processes: their parent, signs of life, replacement, shared numbers."""
