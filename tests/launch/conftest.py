"""Collects how long each injected fault took to be seen, and reports it: measured, never asserted."""

from __future__ import annotations

import pytest

from tests.launch.deployment import DELAYS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line a fault: from the signal to the event in events.jsonl."""
    if DELAYS:
        terminalreporter.section("time from a fault to its event")
        for what, seconds in sorted(DELAYS):
            terminalreporter.write_line(f"{seconds * 1000:8.0f} ms  {what}")
