"""How much load, for how long, and how much of it is compared."""

from __future__ import annotations

from dataclasses import dataclass

GROUPS = 4
"""Prefixes that prompts share."""


@dataclass(frozen=True)
class LoadOptions:
    """The load ends with the first of `requests` and `seconds` that is reached."""

    concurrency: int = 8
    requests: int | None = 200
    seconds: float | None = None
    window: int = 50
    """Requests between two reloads, and of each line of the report."""
    sample: float = 0.25
    """Share of the answers that are compared with one engine alone."""
    longest_prompt: int = 2048
    seed: int = 0
