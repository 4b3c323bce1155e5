"""From a file to a validated recipe: YAML, extends, overrides, and problems with their lines."""
