"""Corrections of upstream code that a deployment needs today: one file a patch, listed in registry.py."""
