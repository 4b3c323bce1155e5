"""Whose a shared-memory segment is, and when it may go: real processes that make them and are killed."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from pdserve.reach.protocol import Died, Gone, Hello
from pdserve.run.directory import RunDir
from pdserve.run.orphans import stop_left
from pdserve.run.state import NodeState
from pdserve.system import procfs
from pdserve.system.process import send
from pdserve.system.procfs import ProcessId
from pdserve.system.shared_memory import ShmLedger, segment_inodes
from tests.launch.records import HERE, identity_of, recorded_state
from tests.supervision.agents import agent, planned, until, until_gone

pytestmark = pytest.mark.process

MAKER = """
import os, sys
held = []

def make(kind):
    name = f"{kind}_{os.getpid()}_0"
    held.append(os.open("/dev/shm/" + name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    os.ftruncate(held[-1], 4096)
    return name

if len(sys.argv) > 1:
    print("made", *map(make, sys.argv[1:]), flush=True)
    sys.stdin = open(os.pipe()[0])
for line in sys.stdin:
    line = line.strip()
    print(os.close(held.pop()) if line == "close" else make(line), flush=True)
"""
"""Makes what it is told: on its command line, and then waits; or line by line. `close`: what it has made last."""
KINDS = ["psm", "torch", "lmcache_kv"]


class Maker:
    """A process that makes segments; killed with the block."""

    def __init__(self) -> None:
        self._popen = subprocess.Popen([sys.executable, "-c", MAKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        own_id = identity_of(self._popen.pid)
        self.id: ProcessId = own_id
        self.names: list[str] = []

    @property
    def pid(self) -> int:
        return self.id.pid

    def make(self, kind: str) -> str:
        self.names.append(self._tell(kind))
        return self.names[-1]

    def close_last(self) -> None:
        """Have it close what it has made last."""
        self._tell("close")

    def _tell(self, line: str) -> str:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.write(f"{line}\n".encode())
        self._popen.stdin.flush()
        return self._popen.stdout.readline().decode().strip()

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()

    def close(self) -> None:
        self._popen.kill()
        self._popen.communicate()
        for name in self.names:
            forget(name)


def forget(name: str) -> None:
    """Takes a segment away, whatever state a failed test left it in."""
    (procfs.SHM / name).unlink(missing_ok=True)


def exists(name: str) -> bool:
    return name in segment_inodes()


@pytest.fixture
def ledger(tmp_path: Path) -> ShmLedger:
    return ShmLedger(tmp_path / "shm.json", strangers=segment_inodes())


@pytest.fixture
def maker() -> Iterator[Maker]:
    with closing(Maker()) as process:
        yield process


@pytest.fixture
def stranger() -> Iterator[Maker]:
    """A process of the same user that is not ours."""
    with closing(Maker()) as process:
        yield process


@pytest.mark.parametrize("taken_over", [False, True])
def test_what_one_of_ours_was_seen_with_is_removed_once_it_is_dead(
    tmp_path: Path, ledger: ShmLedger, maker: Maker, taken_over: bool
) -> None:
    """Also by the guard after its agent."""
    name = maker.make("psm")
    assert ledger.unknown()
    ledger.record([maker.pid])
    assert not ledger.unknown()
    maker.kill()
    later = ShmLedger(tmp_path / "shm.json") if taken_over else ledger
    assert later.remove_orphans() == [name]
    assert not exists(name)


@pytest.mark.parametrize("kind", KINDS)
def test_while_its_maker_lives_it_stays(ledger: ShmLedger, maker: Maker, kind: str) -> None:
    """It may hand on the name: another process of ours that stops is no reason to take it away."""
    name = maker.make(kind)
    ledger.record([maker.pid])
    maker.close_last()
    assert (ledger.remove_orphans(), exists(name)) == ([], True)
    maker.kill()
    assert (ledger.remove_orphans(), exists(name)) == ([name], False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_strangers_stays_whatever_it_is_called(ledger: ShmLedger, maker: Maker, stranger: Maker, kind: str) -> None:
    ours = maker.make(kind)
    name = stranger.make(kind)
    ledger.record([maker.pid])
    for process in (maker, stranger):
        process.kill()
    ledger.record(())
    assert (ledger.remove_orphans(), exists(name)) == ([ours], True)


def test_what_a_stranger_only_reads_is_in_use(ledger: ShmLedger, maker: Maker) -> None:
    name = maker.make("psm")
    ledger.record([maker.pid])
    with (procfs.SHM / name).open("rb"):
        maker.kill()
        assert (ledger.remove_orphans(), exists(name)) == ([], True)
    assert ledger.remove_orphans() == [name]


def test_a_file_name_of_any_bytes_keeps_no_segment_of_ours(ledger: ShmLedger, maker: Maker, tmp_path: Path) -> None:
    """The kernel shows the names of all that is mapped, and they are bytes of any kind."""
    name = maker.make("psm")
    with open(os.fsencode(tmp_path) + b"/\xff", "w+b") as file:  # noqa: PTH123  (a Path is text)
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096):
            ledger.record([maker.pid, os.getpid()])
            maker.kill()
            assert ledger.remove_orphans() == [name]


def test_what_a_thread_calls_itself_hides_no_process() -> None:
    command = "import sys; open('/proc/self/comm', 'wb').write(b'\\xff (x'); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as renamed:
        assert renamed.stdout is not None
        renamed.stdout.readline()
        identity = identity_of(renamed.pid)
        assert identity.alive()
        assert procfs.owner(renamed.pid) == os.getuid()
        assert procfs.process_title(renamed.pid) == "\N{REPLACEMENT CHARACTER} (x"
        renamed.kill()


# The whole way ------------------------------------------------------------------------------------------------------


ORDERS = ["engine", "agent", "engine agent", "agent engine", "all at once"]


@pytest.mark.parametrize("order", ORDERS)
async def test_nothing_of_a_killed_engine_is_left_in_whatever_order_all_die(tmp_path: Path, order: str) -> None:
    """`all at once`: its guard too, as the OOM killer does it; then `pdserve down` finds no process."""
    run = RunDir.create(tmp_path, "fake", "run-1")
    log, file = run.path / "logs/engine@here.log", run.path / "shm@here.json"
    made: list[str] = []
    at_once = order == "all at once"
    try:
        async with agent(run.path) as under_test:
            hello = await under_test.expect(Hello)
            engine = await under_test.start(planned("engine", MAKER, *KINDS))
            await until(lambda: log.exists() and log.read_text().endswith("\n"))
            made.extend(log.read_text().split()[1:])
            assert len(made) == len(KINDS)
            await until(lambda: set(made) <= {segment[0] for segment in json.loads(file.read_text())["segments"]})
            if at_once:
                assert send(hello.guard, signal.SIGSTOP)
            for victim in ("agent", "engine") if at_once else order.split():
                send(engine if victim == "engine" else hello.agent, signal.SIGKILL)
            if order == "engine":
                await under_test.expect(Died, "engine")
                await under_test.stop("engine")
            else:
                if at_once:
                    await until_gone(engine)
                    assert send(hello.guard, signal.SIGKILL)
                await under_test.expect(Gone)
                await until_gone(hello.agent, hello.guard, engine)
        if at_once:
            node = NodeState(agent=hello.agent, guard=hello.guard, hostname=HERE)
            assert not await stop_left(recorded_state(launcher=hello.agent, nodes={"here": node}), run)
        assert [name for name in made if exists(name)] == []
    finally:
        for name in made:
            with suppress(OSError):
                forget(name)
