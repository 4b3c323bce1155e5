"""Recipes that are written by a verb."""
