"""Fixtures for everybody: a private home for run directories, and the promise that nothing outlives a test.

tests/README.md has the rules that tests keep so that they can run in any order, alone, and beside each other.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import select
import signal
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, settings

from pdserve.system import procfs
from pdserve.system.process import adopt_orphans
from pdserve.system.shared_memory import segment_inodes
from tests import isolation
from tests.launch.deployment import Deployment
from tests.nursery import Nursery

_CGROUP_SECONDS = 30.0
_ENDING_SECONDS = 30.0
_SIGNAL_SECONDS = 1.0

ON_THE_MACHINE = ("real", "upstream", "cluster", "container")
"""Markers of tests that need the machine's own network."""

# How long an example takes says something about the machine, and nothing about what is tested.
_EXAMPLES = 100 if os.environ.get("PDSERVE_TEST_FULL") else 30
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=_EXAMPLES
)
settings.load_profile("any machine")


@pytest.fixture(scope="session", autouse=True)
def _own_shared_memory() -> None:
    """What other programs of this machine do with shared memory meets no test, where the kernel allows that."""
    isolation.separate_memory()


@pytest.fixture(scope="session", autouse=True)
def _own_cgroup() -> Iterator[None]:
    with isolation.separate_cgroup():
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_network(request: pytest.FixtureRequest) -> None:
    """What other programs of this machine listen on meets no test, where the kernel allows that. Tests of the other
    kinds download, or bring networks of their own; the variable is for those that do neither."""
    if "PDSERVE_TEST_OWN_NETWORK" in os.environ or not any(
        item.get_closest_marker(kind) for item in request.session.items for kind in ON_THE_MACHINE
    ):
        isolation.separate_network()


@pytest.fixture(scope="session", autouse=True)
def _a_terminal_is_heard() -> None:
    """Below nohup SIGHUP is ignored, as a script's background command SIGINT, also by all that a test starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    """What a test, or a verb that it runs in this process, does with the signals that stop is undone after it."""
    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {signum: signal.getsignal(signum) for signum in stops}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.fixture(scope="session", autouse=True)
def _see_orphans() -> None:
    """Orphans of what a test starts are re-parented to the test process, so that they cannot hide."""
    adopt_orphans()


@pytest.fixture(scope="session", autouse=True)
def _end_nursery(_own_shared_memory: None, _own_cgroup: None, _own_network: None, _see_orphans: None) -> Iterator[None]:
    """Before the namespaces and the cgroup of the tests are left."""
    yield
    Nursery.close_shared()


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a process, a shared-memory segment or a cgroup behind."""
    if request.config.pluginmanager.has_plugin("tests.pure"):
        yield  # which starts none
        return
    before, segments, cgroups = _descendants(), isolation.segments(), isolation.cgroups()
    yield
    _reap_zombies(before)
    if left := _descendants() - before - Nursery.pids():
        # What a longer-lived fixture's process starts belongs to that fixture.
        left = _without_ending(left - procfs.family(before - Nursery.pids()))
    assert not left, "processes outlive the test: " + ", ".join(f"{pid} ({procfs.command(pid)})" for pid in left)
    # What a longer-lived fixture's process has mapped belongs to that fixture.
    if new := isolation.segments() - segments:
        used = procfs.shared_memory_in_use()
        new -= {name for name, inode in segment_inodes().items() if inode in used}
        new &= isolation.segments()
    assert not new, f"shared memory outlives the test: {new}"
    # The last of a guard's work, which nothing else waits for where its launcher was killed.
    deadline = time.monotonic() + _CGROUP_SECONDS
    while (kept := isolation.cgroups() - cgroups) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not kept, f"cgroups outlive the test: {kept}"


def _without_ending(left: set[int]) -> set[int]:
    """One that was killed has no memory, thus no command, before it has ended; on a busy machine that takes a while.
    One that the signal has just reached still has its command."""
    for pid in left:
        with suppress(ProcessLookupError):
            end = os.pidfd_open(pid)
            select.select([end], [], [], _SIGNAL_SECONDS if procfs.command(pid) else _ENDING_SECONDS)
            os.close(end)
    return left & _descendants() if left else left


def _descendants() -> set[int]:
    """Most tests start nothing, and a look at every process of the machine takes longer than they do."""
    return procfs.descendants(os.getpid()) if _has_children() else set()


def _has_children() -> bool:
    """True also where the kernel does not say. Whoever descends from us and lost its parents is a child of ours."""
    try:
        return any((task / "children").read_bytes() for task in Path("/proc/self/task").iterdir())
    except OSError:
        return True


def _reap_zombies(keep: set[int]) -> None:
    """Collects adopted orphans that have ended; children of longer-lived fixtures are theirs to wait for."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid in keep:
            return
        os.waitpid(ended.si_pid, 0)


@pytest.fixture
def pdserve_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own for run directories and runtime secrets."""
    home, runtime = tmp_path / "home", tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("PDSERVE_HOME", str(home))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    return home


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that ends what a fixture of its module has made comes after the module's others, in a random order too."""
    first: dict[Path, int] = {}
    for place, item in enumerate(items):
        first.setdefault(item.path, place)
    items.sort(key=lambda item: (first[item.path], item.get_closest_marker("ends_fixture") is not None))


LoopFactory = Callable[[], asyncio.AbstractEventLoop]


@pytest.fixture(autouse=True)
def loop_factory() -> LoopFactory | None:
    """What makes the event loop of a test that is a coroutine; None: asyncio's own."""
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs in an event loop of its own, and what of its fixtures is an asynchronous context
    is opened in it."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    make_loop = cast("LoopFactory | None", pyfuncitem.funcargs["loop_factory"])
    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(_await_test(pyfuncitem))
    return True


async def _await_test(test: pytest.Function) -> None:
    async with AsyncExitStack() as stack:
        arguments = {}
        for name in inspect.signature(test.obj).parameters:
            value: Any = test.funcargs[name]
            is_context = isinstance(value, AbstractAsyncContextManager)
            arguments[name] = await stack.enter_async_context(value) if is_context else value
        await test.obj(**arguments)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """The report of a failure says what its deployments had to say."""
    report = yield
    if report.failed:
        for name, value in getattr(item, "funcargs", {}).items():
            if isinstance(value, Deployment) and (text := value.post_mortem()):
                report.sections.append((f"deployment of {name}", text))
    return report
