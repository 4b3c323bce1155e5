"""Checks of several nodes together, made by looking at all of them at once."""
