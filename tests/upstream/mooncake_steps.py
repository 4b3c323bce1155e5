"""What scenarios between two engines of mooncake_lab.py have in common."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from tests.upstream.mooncake_lab import ABORT_TIMEOUT, Engine

UNPATCHED_ABORT_SECONDS, PATCHED_ABORT_SECONDS = 6, 60
"""Without the patches most scenarios wait for it. With them nothing does, so that it can be far longer than whatever a
busy machine takes."""
os.environ[ABORT_TIMEOUT] = str(UNPATCHED_ABORT_SECONDS)
WATCHED, LONG = UNPATCHED_ABORT_SECONDS / 2, 4.0 * UNPATCHED_ABORT_SECONDS
"""WATCHED: how long it is seen that something does not happen. LONG: for what must happen."""
_tokens = iter(range(100, 10**9))


def set_patched() -> None:
    os.environ[ABORT_TIMEOUT] = str(PATCHED_ABORT_SECONDS)


def abort_seconds() -> int:
    return int(os.environ[ABORT_TIMEOUT])


def soon() -> float:
    """Seconds for what needs no timeout: over before the abort timeout can have done anything."""
    return abort_seconds() / 2


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
