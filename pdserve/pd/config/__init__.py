"""The proxy's configuration."""
