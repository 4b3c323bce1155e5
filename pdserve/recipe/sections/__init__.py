"""The models of a recipe's sections."""
