"""Patches of vLLM's NixlConnector."""
