"""Patches of vLLM's OffloadingConnector."""
