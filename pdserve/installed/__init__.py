"""The installed engines, read from package metadata and files: nothing is imported."""
