"""Patches of vLLM's MooncakeConnector."""
