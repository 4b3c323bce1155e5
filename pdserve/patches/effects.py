"""Counters of what the patches of this process have done so far; the process's record (record.py) publishes them.

Cheap enough for a scheduler's step: a lock and a dictionary.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

_lock = threading.Lock()
_totals: dict[tuple[str, str], float] = {}
_on_change: Callable[[], None] | None = None


def count(patch: str, effect: str, n: float = 1) -> None:
    """Add to a counter of the patch; the effect must be one that its Patch declares."""
    if n == 0:
        return
    with _lock:
        _totals[patch, effect] = _totals.get((patch, effect), 0) + n
    _notify_change()


def gauge(patch: str, effect: str, value: float) -> None:
    """Set a value that goes up and down, such as the blocks in quarantine."""
    with _lock:
        if _totals.get((patch, effect), 0) == value:
            return
        _totals[patch, effect] = value
    _notify_change()


def totals() -> dict[tuple[str, str], float]:
    """Return (patch, effect) -> value, in this process."""
    with _lock:
        return dict(_totals)


def notify(changed: Callable[[], None] | None) -> None:
    """Call `changed` after every change, in the thread that made it; it must be quick."""
    global _on_change
    _on_change = changed


def forget() -> None:
    """Start at nothing again: a forked child counts for itself, and its lock may have been held by another thread."""
    global _lock
    _lock = threading.Lock()
    _totals.clear()


def _notify_change() -> None:
    if _on_change is not None:
        _on_change()
