"""Patches of vLLM's scheduler."""
