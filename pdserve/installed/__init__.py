"""What is installed, read from package metadata: nothing is imported."""
