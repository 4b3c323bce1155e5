"""Fixtures for everybody: a private home for run directories, and the promise that nothing outlives a test."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from pdserve.system import procfs
from pdserve.system.process import adopt_orphans
from pdserve.system.shared_memory import existing
from tests import own_memory
from tests.launch.deployment import DELAYS, Deployment
from tests.launch.post_mortem import post_mortem

# How long an example takes says something about the machine, and nothing about what is tested.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(scope="session", autouse=True)
def _own_shared_memory() -> None:
    """What other programs of this machine do with shared memory meets no test, where the kernel allows that."""
    own_memory.separate()


@pytest.fixture(scope="session", autouse=True)
def _see_orphans() -> None:
    """Orphans of what a test starts are re-parented to the test process, so that they cannot hide."""
    adopt_orphans()


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a process or a shared-memory segment behind."""
    if request.config.pluginmanager.has_plugin("tests.pure"):
        yield  # which starts none
        return
    before, segments = _descendants(), own_memory.segments()
    yield
    _reap_zombies(before)
    # What a longer-lived fixture's process starts belongs to that fixture.
    left = {pid: procfs.command(pid) for pid in _descendants() - before - procfs.family(before)}
    assert not left, f"processes outlive the test: {left}"
    # What a longer-lived fixture's process has mapped belongs to that fixture.
    if new := own_memory.segments() - segments:
        used = procfs.shared_memory_in_use()
        new -= {name for name, inode in existing().items() if inode in used}
        new &= own_memory.segments()
    assert not new, f"shared memory outlives the test: {new}"


def _descendants() -> set[int]:
    return procfs.descendants(os.getpid())


def _reap_zombies(keep: set[int]) -> None:
    """Collects adopted orphans that have ended; children of longer-lived fixtures are theirs to wait for."""
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None or found.si_pid in keep:
            return
        os.waitpid(found.si_pid, 0)


@pytest.fixture
def pdserve_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own for run directories and runtime secrets."""
    home, runtime = tmp_path / "home", tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("PDSERVE_HOME", str(home))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    return home


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """The report of a failure says what its deployments had to say."""
    report = yield
    if report.failed:
        for name, value in getattr(item, "funcargs", {}).items():
            if isinstance(value, Deployment) and (text := post_mortem(value)):
                report.sections.append((f"deployment of {name}", text))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How long each injected fault took to become an event: measured and reported, never asserted."""
    if DELAYS:
        terminalreporter.section("time from a fault to its event")
        for what, seconds in sorted(DELAYS):
            terminalreporter.write_line(f"{seconds * 1000:8.0f} ms  {what}")
