"""What is installed, read from package metadata and files: nothing is imported."""
