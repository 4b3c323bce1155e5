"""Programs that run with one upstream version's sources first on the path, and print what they saw as JSON."""
