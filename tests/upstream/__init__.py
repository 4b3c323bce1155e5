"""Patches on the real code of every upstream version that pdserve knows, side by side in one environment."""
