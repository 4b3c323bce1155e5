"""Scriptable stand-ins for the processes of a deployment. Standard library only, so that they start at once."""
