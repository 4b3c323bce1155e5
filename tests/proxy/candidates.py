"""Workers as a policy sees them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Worker:
    name: str
    requests: int = 0
    prompt_tokens: int = 0
    kv_usage: float = 0.0


def workers(count: int, prefix: str = "worker") -> list[Worker]:
    return [Worker(f"{prefix}-{index}") for index in range(count)]
