"""A process in a cgroup of its own, on this machine's kernel: nothing that it starts gets away, and nothing is left.

Where no cgroup can be made these tests assert that it is said why, and that processes run without one.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.reach.protocol import Gone, Hello
from pdserve.system import cgroup
from pdserve.system.cgroup import Cgroup, place
from pdserve.system.process import send, stop_family
from pdserve.system.procfs import ProcessId
from tests.fakes.engine_process import DAEMON
from tests.launch.records import identity_of
from tests.supervision.agents import agent, planned, until, until_gone

pytestmark = pytest.mark.process

AND_STAYS = (
    f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {DAEMON!r}], env={{}}); time.sleep(600)"
)


@pytest.fixture
def ours() -> Iterator[Cgroup | None]:
    """A cgroup of the test's own; None where none can be made, which is then said."""
    made, why_not = cgroup.make(f"{cgroup.prefix('test')}here-{os.getpid()}", os.environ)
    assert (made is None) == bool(why_not)
    yield made
    if made is not None and not made.remove():
        left = made.members()
        # The next test's has the same name.
        asyncio.run(stop_family(made.members, orphan_grace=0, cgroups=(made,)))
        raise AssertionError(f"left in the cgroup: {left}")


async def daemon_of(log: Path) -> ProcessId:
    """What the log names, once it does."""
    await until(lambda: log.exists() and "daemon " in log.read_text() and log.read_text().endswith("\n"))
    return identity_of(int(log.read_text().split()[-1]))


def test_no_process_kills_its_own_cgroup(ours: Cgroup | None) -> None:
    if ours is None:
        return
    with ours.born_here():
        ours.kill()
        assert not ours.remove()
    assert place()[0] == ours.path.parent


@pytest.mark.parametrize("how", ["stop", "agent killed", "guard killed"])
async def test_a_daemon_of_an_agents_process_ends_with_it(tmp_path: Path, how: str, ours: Cgroup | None) -> None:
    """Without a cgroup, with its agent."""

    async with agent(tmp_path) as under_test:
        hello = await under_test.expect(Hello)
        assert (hello.cgroup is None) == bool(hello.no_cgroup) == (ours is None)
        started = await under_test.start(planned("engine", AND_STAYS))
        daemon = await daemon_of(tmp_path / "logs/engine@here.log")
        if how == "stop":
            await under_test.stop("engine")
            assert daemon.alive() == (ours is None)
        if how in ("agent killed", "guard killed"):
            send(hello.agent if how == "agent killed" else hello.guard, signal.SIGKILL)
            await under_test.expect(Gone)
    for process in (started, hello.agent, hello.guard):
        await until_gone(process)
    assert not daemon.alive()
    assert hello.cgroup is None or not Path(hello.cgroup.path).exists()
