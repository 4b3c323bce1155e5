"""What cannot be fetched is not tested, and said loudly: as a skip with its reason, and once more at the end."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import pytest

from tests.upstream.run import preloaders
from tests.upstream.sources import SourcesError

_NOT_TESTED = "NOT TESTED: "


@pytest.fixture(scope="session", autouse=True)
def _preloaders(request: pytest.FixtureRequest) -> Generator[None]:
    """Before the first test, so that no test is blamed for a process that all of them share."""
    if not any(item.get_closest_marker("upstream") for item in request.session.items):
        yield  # the few tests here that need no sources
        return
    shared = preloaders()
    yield
    shared.close()


@contextmanager
def _skipped_without_sources() -> Generator[None]:
    try:
        yield
    except SourcesError as error:
        pytest.skip(f"{_NOT_TESTED}{error}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    with _skipped_without_sources():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    with _skipped_without_sources():
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons = {report.longreprtext.partition(_NOT_TESTED)[2] for report in terminalreporter.getreports("skipped")}
    for reason in sorted(reasons - {""}):
        terminalreporter.write_line(f"NOT TESTED AGAINST OTHER UPSTREAM VERSIONS: {reason}", red=True, bold=True)
