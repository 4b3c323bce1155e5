"""Runs on a node: the agent, its guard, and the processes that it owns."""
