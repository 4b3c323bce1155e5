"""Fetches the weights of a model: `python -m pdserve.weights`."""
