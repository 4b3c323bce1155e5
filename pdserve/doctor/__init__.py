"""Find why a run failed, or is slow: rules over what its run directory and its live processes show. Nothing is
changed."""
