"""The lookups that an LMCache server has logged, replayed by LMCache's own cache simulator."""
