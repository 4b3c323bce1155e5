"""Patches of vLLM's MultiConnector."""
