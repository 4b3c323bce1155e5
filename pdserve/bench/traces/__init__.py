"""Traces that a client replays: what a file asks for, in which form the client gets it, and its own prefix hit."""
