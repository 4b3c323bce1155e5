"""The workers: what is known of each, which may be used, what they serve."""
