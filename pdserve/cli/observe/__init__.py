"""Verbs that look at a running deployment, or let other programs do so."""
