"""Patches of LMCache."""
