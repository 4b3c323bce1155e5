"""Verbs that write recipes."""
