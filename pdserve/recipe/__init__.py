"""Recipes: models, loader with line numbers, overrides, JSON Schema. Knows nothing of processes."""
