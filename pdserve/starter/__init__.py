"""A first recipe of a model on known hardware, with the reason of each value."""
