"""Logs of engines: lines, progress, rotation, and known causes of death."""
