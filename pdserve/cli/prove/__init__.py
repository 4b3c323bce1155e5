"""Verbs that prove something of a running deployment: `verify` and `eval`."""
