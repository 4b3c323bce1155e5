"""What scenarios between two engines of mooncake_lab.py have in common. Prefill's abort timeout is 6 s in all."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

ABORT_SECONDS = 6
os.environ["VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"] = str(ABORT_SECONDS)

from tests.upstream.mooncake_lab import Engine  # noqa: E402

SHORT, LONG = ABORT_SECONDS / 2, 4.0 * ABORT_SECONDS
"""SHORT: long enough for whatever needs no timeout on a slow machine, and over before the abort timeout can have done
anything. LONG: for what must happen."""
_tokens = iter(range(100, 10**9))


def prompt(blocks: int = 2) -> list[int]:
    return [next(_tokens) for _ in range(32 * blocks)]


def arrived(decode: Engine, name: str) -> Callable[[], bool]:
    return lambda: decode.lab.status(name) == "RUNNING"


def all_free(*engines: Engine) -> Callable[[], bool]:
    return lambda: all(engine.lab.free_blocks == engine.blocks - 1 for engine in engines)


def rounded(seconds: float) -> float | None:
    return None if seconds == float("inf") else round(seconds, 3)


def slowed(prefill: Engine) -> tuple[threading.Event, threading.Event]:
    """Its writes: when one has begun, and what it then waits for."""
    begun, go_on = threading.Event(), threading.Event()
    write = prefill.worker._send_blocks

    def slowly(*args: Any) -> int:
        begun.set()
        go_on.wait(60)
        return int(write(*args))

    prefill.worker._send_blocks = slowly
    return begun, go_on
