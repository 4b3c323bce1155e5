"""Verbs that explain a run."""
