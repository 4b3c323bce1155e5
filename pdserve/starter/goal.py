"""What a deployment is for."""

from __future__ import annotations

from enum import StrEnum


class Goal(StrEnum):
    """What the deployment is for."""

    THROUGHPUT = "throughput"
    LATENCY = "latency"
    AGENTS = "agents"
