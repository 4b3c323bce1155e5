"""Tests that share one deployment of recipes/tiny-cpu.yaml: its start is most of what they cost."""
