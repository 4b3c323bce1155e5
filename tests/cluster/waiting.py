"""Waiting for what only polling can see."""

from __future__ import annotations

import time
from collections.abc import Callable

_POLL_SECONDS = 0.03


def wait_until(what: str, look: Callable[[], object], timeout: float, *, why: Callable[[], str] = str) -> None:
    """Returns when `look` is true; AssertionError with `what` and what `why` says after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not look():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:g} s: {what} {why()}".rstrip())
        time.sleep(_POLL_SECONDS)
