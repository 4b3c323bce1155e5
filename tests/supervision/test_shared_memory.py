"""Whose a shared-memory segment is, and when it may go: real processes that make all kinds of them and are killed."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
import time
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
from pdserve.system.shared_memory import ShmLedger, segment_marks
from tests.launch.records import HERE, identity_of, recorded_state
from tests.supervision.agents import agent, planned, until, until_gone

pytestmark = pytest.mark.process

MAKER = """
import ctypes, os, sys
libc, held = ctypes.CDLL(None), []
libc.shmat.restype = ctypes.c_void_p
libc.shmat.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)

def sysv():
    held.append(libc.shmget(0, 4096, 0o1600))
    return f"sysv/{held[-1]}"

def file(name):
    held.append(os.open("/dev/shm/" + name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    os.ftruncate(held[-1], 4096)
    return name

def unused(name):
    file(name)
    os.close(held.pop())
    return name

def attach(number):
    assert libc.shmat(int(number), None, 0) not in (None, ctypes.c_void_p(-1).value)
    return "attached"

def kind(name):
    names = {"sysv": sysv, "torch": lambda: unused(f"torch_{os.getpid()}_77_0"),
             "lmcache": lambda: unused(f"lmcache_kv_{os.getpid()}_0"), "open": lambda: file(f"psm_{os.getpid()}x")}
    return names[name]() if name in names else attach(name)

if len(sys.argv) > 1:
    print("made", *map(kind, sys.argv[1:]), flush=True)
    sys.stdin = open(os.pipe()[0])
for line in sys.stdin:
    print(kind(line.strip()), flush=True)
"""
"""Makes what it is told: on its command line, and then waits; or line by line."""
UNUSED = ["sysv", "torch", "lmcache"]
"""Kinds that nobody has mapped, open or attached once they are made."""


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
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.write(f"{kind}\n".encode())
        self._popen.stdin.flush()
        self.names.append(self._popen.stdout.readline().decode().strip())
        return self.names[-1]

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
    if name.startswith("sysv/"):
        ctypes.CDLL(None).shmctl(int(name.removeprefix("sysv/")), 0, None)
    elif name != "attached":
        (procfs.SHM / name).unlink(missing_ok=True)


def exists(name: str) -> bool:
    return name in segment_marks()


@pytest.fixture(autouse=True)
def _pids_of_the_whole_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the tests themselves run in a container."""
    monkeypatch.setattr(procfs, "in_first_pid_namespace", lambda: True)


@pytest.fixture
def ledger(tmp_path: Path) -> ShmLedger:
    return ShmLedger(tmp_path / "shm.json", strangers=segment_marks())


@pytest.fixture
def maker() -> Iterator[Maker]:
    with closing(Maker()) as process:
        yield process


@pytest.fixture
def stranger() -> Iterator[Maker]:
    """A process of the same user that is not ours."""
    with closing(Maker()) as process:
        yield process


@pytest.mark.parametrize("kind", UNUSED)
@pytest.mark.parametrize("taken_over", [False, True])
def test_what_one_of_ours_has_made_is_removed_although_no_look_saw_the_two_together(
    tmp_path: Path, ledger: ShmLedger, maker: Maker, kind: str, taken_over: bool
) -> None:
    """Also by the guard after its agent: maker and agent are killed before anybody has looked."""
    ledger.see([maker.pid])
    name = maker.make(kind)
    maker.kill()
    assert ledger.unknown()
    later = ShmLedger(tmp_path / "shm.json", until=time.time()) if taken_over else ledger
    later.record(())
    assert later.remove_orphans() == [name]
    assert not exists(name)


@pytest.mark.parametrize("kind", [*UNUSED, "open"])
def test_while_its_maker_lives_it_stays(ledger: ShmLedger, maker: Maker, kind: str) -> None:
    """It may hand on the name: another process of ours that stops is no reason to take it away."""
    name = maker.make(kind)
    ledger.record([maker.pid])
    assert (ledger.remove_orphans(), exists(name)) == ([], True)
    maker.kill()
    assert (ledger.remove_orphans(), exists(name)) == ([name], False)


@pytest.mark.parametrize("kind", [*UNUSED, "open"])
def test_a_strangers_stays_whatever_it_is_called(ledger: ShmLedger, maker: Maker, stranger: Maker, kind: str) -> None:
    ours = maker.make(kind)
    name = stranger.make(kind)
    ledger.record_of_all(lambda: {maker.pid})
    for process in (maker, stranger):
        process.kill()
    ledger.record(())
    assert (ledger.remove_orphans(), exists(name)) == ([ours], True)


@pytest.mark.parametrize("kind", UNUSED)
@pytest.mark.parametrize(("ended", "ours"), [(-60.0, False), (+60.0, True)], ids=["before", "after"])
def test_a_pid_that_is_a_strangers_by_now_proves_nothing(
    tmp_path: Path, stranger: Maker, kind: str, ended: float, ours: bool
) -> None:
    """A process of ours had its number until a minute before the segment was made; had it lived on, it were ours."""
    file, now = tmp_path / "shm.json", time.time()
    ShmLedger(file, strangers=segment_marks()).save()
    life = [stranger.pid, stranger.id.start_ticks - 1, now - 600, now + ended]
    file.write_text(json.dumps({**json.loads(file.read_text()), "lives": [life]}))
    name = stranger.make(kind)
    stranger.kill()
    later = ShmLedger(file)
    later.record(())
    assert later.remove_orphans() == ([name] if ours else [])
    assert exists(name) is not ours


def test_an_attached_segment_stays_until_it_is_detached(ledger: ShmLedger, maker: Maker, stranger: Maker) -> None:
    name = maker.make("sysv")
    assert stranger.make(name.removeprefix("sysv/")) == "attached"
    ledger.record([maker.pid])
    maker.kill()
    assert (ledger.remove_orphans(), exists(name)) == ([], True)
    stranger.kill()
    assert (ledger.remove_orphans(), exists(name)) == ([name], False)


def test_what_a_stranger_only_reads_is_in_use(ledger: ShmLedger, maker: Maker) -> None:
    name = maker.make("open")
    ledger.record([maker.pid])
    with (procfs.SHM / name).open("rb"):
        maker.kill()
        assert (ledger.remove_orphans(), exists(name)) == ([], True)
    assert ledger.remove_orphans() == [name]


@pytest.mark.parametrize("kind", ["torch", "lmcache"])
def test_a_pid_in_a_name_proves_nothing_where_containers_have_their_own(
    ledger: ShmLedger, maker: Maker, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of them may share /dev/shm, and one process in each has that PID."""
    monkeypatch.setattr(procfs, "in_first_pid_namespace", lambda: False)
    ledger.see([maker.pid])
    name = maker.make(kind)
    ledger.record([maker.pid])
    maker.kill()
    assert (ledger.remove_orphans(), exists(name)) == ([], True)


def test_a_pid_namespace_of_ones_own_is_not_the_first() -> None:
    command = "from pdserve.system import procfs; print(procfs.in_first_pid_namespace())"
    argv = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", command]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode and "unshare" in done.stderr:
        pytest.skip("no PID namespaces for this user")
    assert done.stdout == "False\n", done.stderr


def test_a_file_name_of_any_bytes_keeps_no_segment_of_ours(ledger: ShmLedger, maker: Maker, tmp_path: Path) -> None:
    """The kernel shows the names of all that is mapped, and they are bytes of any kind."""
    name = maker.make("open")
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
            engine = await under_test.start(planned("engine", MAKER, "sysv", "torch", "lmcache", "open"))
            await until(lambda: log.exists() and log.read_text().endswith("\n"))
            made.extend(log.read_text().split()[1:])
            assert len(made) == 4
            await until(lambda: set(made) <= set(json.loads(file.read_text())["names"]))
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
