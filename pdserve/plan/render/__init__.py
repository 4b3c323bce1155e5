"""A plan as text: a shell script, a batch script."""
