"""Load a file as a validated recipe: YAML, extends, overrides, and problems with their lines."""
