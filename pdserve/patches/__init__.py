"""Corrections of upstream code that a deployment needs today: listed in registry.py."""
