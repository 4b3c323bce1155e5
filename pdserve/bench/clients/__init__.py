"""The load clients of `pdserve bench`: what each is given, and how its output is read."""
