"""The bodies of requests and the APIs that they belong to."""
