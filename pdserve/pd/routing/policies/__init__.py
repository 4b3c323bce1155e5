"""The routing policies that a recipe can name, what two of them share, and session affinity around any of them."""
