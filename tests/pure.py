"""A pytest plugin, loaded by `scripts/test --quick`: what is not marked `process` starts no process.

A test that does fails, and the failure names the marker: so the quick tests stay quick, and the marker stays true.
Properties are tried on fewer examples. Ours: pytest-socket and its kind watch sockets, not processes.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import settings

_EXAMPLES = 15
"""Of each property, or a multiple of it where its settings have one. The ordinary run has hypothesis' own 100."""
_STARTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.exec", "os.system"})
"""Audit events of Python's own ways to start a process."""

_running: str | None = None
"""The test that runs now; None between two of them, when pytest may start what it likes."""


def _watch(event: str, _: tuple[Any, ...]) -> None:
    if event in _STARTS and _running is not None:
        pytest.fail(f"{_running} starts a process ({event}): mark it with pytest.mark.process")


@pytest.hookimpl(trylast=True)
def pytest_configure() -> None:
    """An audit hook cannot be removed: it lasts as long as this pytest."""
    sys.addaudithook(_watch)
    settings.register_profile("quick", parent=settings(), max_examples=_EXAMPLES)
    settings.load_profile("quick")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Fixtures count too: what a module's fixture starts, its first test is asked for."""
    global _running
    _running = item.nodeid
    try:
        return (yield)
    finally:
        _running = None
