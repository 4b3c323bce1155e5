"""The goals of a first recipe. Apart from draft.py because the command line reads it for `--help`."""

from __future__ import annotations

from enum import StrEnum


class Goal(StrEnum):
    """A goal of a deployment."""

    THROUGHPUT = "throughput"
    LATENCY = "latency"
    AGENTS = "agents"
