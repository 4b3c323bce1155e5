"""Serving clients: listeners, the gateway, the request parser, admin, accounting."""
