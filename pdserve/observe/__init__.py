"""Read what a running deployment reports of itself: recorded state, engines, LMCache."""
