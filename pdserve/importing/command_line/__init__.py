"""Command lines of engines, as other tools write them."""
