"""Start, watch and stop process trees: each in a session of its own, watched by pidfd, stopped to the last descendant.

This module is the only one that starts processes. Whoever spawns a child owns it and calls `stop`. Every process of
ours carries a name in its environment:

    PDSERVE_PROCESS=<run id>/<token of the run>/<process>.<life>

The token is random and stands in the run's state.json and in environments of its processes only, which other users
cannot read: it is not written by hand. The life counts the starts of an agent, so that what is left of an earlier life
of a process is none of the next one. A process that gives itself a title, as vLLM's engine core does, overwrites its
environment: it is known by its parents and its session.

Whoever copies a whole environment copies the name too. That process is left alone while a guard lives, and where
cgroups show what a run has started; else it counts as one of the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import os
import secrets
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from pdserve.system import procfs
from pdserve.system.cgroup import Cgroup
from pdserve.system.pipe_writer import NewestLines
from pdserve.system.procfs import ProcessId
from pdserve.time_limit import time_limit

_POLL_SECONDS = 0.05
_ORPHAN_GRACE_SECONDS = 2.0
"""What a root leaves behind gets this on top of the root's own grace, and no more than that one."""
_EMPTY_SECONDS = 5.0
"""What was killed has ended long before, unless it waits for a device in the kernel."""
_KILL_SECONDS = 30.0
"""Who still lives then waits for a device in the kernel, or stands in a frozen cgroup."""
_REFUSED_SECONDS = 2.0
"""For those that we may not signal (another user's): what they wait for was killed, and they may end by themselves."""
LATE = "no answer within"
"""How the error of a tool begins that had no end in its time."""
_OUTPUT_BYTES = 64 << 20
"""The output of a tool: one without an end would take all memory."""
_PART_BYTES = 1 << 16
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True)
class Exit:
    """The end of a process; `code` None when it was not our child and only its end could be seen."""

    code: int | None

    def __str__(self) -> str:
        if self.code is None:
            return "ended"
        if self.code < 0:
            with contextlib.suppress(ValueError):
                return f"killed by {signal.Signals(-self.code).name}"
            return f"killed by signal {-self.code}"
        return f"exited with code {self.code}"


class Child:
    """A process that we started and its whole family."""

    def __init__(self, popen: subprocess.Popen[bytes], marker: str, cgroup: Cgroup | None = None) -> None:
        """Hold a child that was started. `marker`: the name that it carries in its environment."""
        self._popen = popen
        self._cgroup = cgroup
        self._control: NewestLines | None = None
        self._marker = f"{MARKER}={marker}".encode()
        identity = procfs.identify(popen.pid)
        # Unreaped, so the entry in /proc is still there even if the program has already ended.
        assert identity is not None
        self.identity: ProcessId = identity
        self.started = time.monotonic()
        self._reaped: int | None = None
        """Clock ticks since boot; from then on its PID may be another process's."""
        self._adopted: set[ProcessId] = set()
        """Our children since their parent, one of the tree, has ended."""

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def reaped(self) -> bool:
        """Tell whether the child's exit code was collected: the kernel may give its PID to any process then."""
        return self._reaped is not None

    def family(self) -> set[int]:
        """Return the live PIDs of the tree, orphaned members included, until nothing of it is left. Those that have
        left their session too are known among our own descendants by the name in their environment: the owner of a
        child has adopted orphans. One that has neither session nor name is known by the cgroup alone."""
        roots = set() if self._cgroup is None else self._cgroup.members()
        if self._reaped is None:
            roots.add(self.pid)
        else:
            # A later session may have its number. One that began in the tick of the root's end can be of either.
            for member in procfs.identities(procfs.in_session(self.pid)):
                if member.start_ticks < self._reaped or self._is_ours(member.pid):
                    roots.add(member.pid)
        return procfs.family(roots, within=os.getpid(), ours=self._is_ours)

    def _is_ours(self, pid: int) -> bool:
        return self._marker in procfs.environment(pid)

    def collect_adopted(self) -> None:
        """Wait for those of the tree that have ended as our own children: an owner that has adopted orphans would keep
        them. No other child, as an agent's `reap_adopted` would: a launcher has children that others wait for."""
        children = procfs.identities(procfs.children() - {self.pid})
        # One that has ended shows no environment any more.
        self._adopted = {child for child in children if child in self._adopted or self._has_left(child.pid)}
        for child in self._adopted:
            os.waitpid(child.pid, os.WNOHANG)

    def _has_left(self, child: int) -> bool:
        """Return whether a child of ours was started by the tree."""
        try:
            return os.getsid(child) == self.pid or self._is_ours(child)
        except ProcessLookupError:
            return False

    def poll(self) -> Exit | None:
        """Return how the root ended; None while it runs."""
        ticks = time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")
        code = self._popen.poll()
        if code is None:
            return None
        if self._reaped is None:
            self._reaped = math.floor(ticks)
        return Exit(code)

    async def wait(self) -> Exit:
        """Wait for the end of the root process, and return how it ended. Its pidfd wakes this: no polling, no delay."""
        if (ended := self.poll()) is None:
            await pid_end(self.pid)
            ended = self.poll()
        while ended is None:  # a debugger that holds it learns of its end before us
            await asyncio.sleep(_POLL_SECONDS)
            ended = self.poll()
        return ended

    def push(self, about: str, line: str, behind: Callable[[bool], None]) -> None:
        """Send a line to the child's stdin, without waiting: while the child does not read, only the newest line about
        each thing waits. `behind` is called when that lasts, and when it is over. One that has gone is no error
        here."""
        if self._popen.stdin is None or self._popen.stdin.closed:
            return
        if self._control is None:
            self._control = NewestLines(self._popen.stdin.fileno(), behind)
        self._control.write(about, line.encode() + b"\n")

    async def stop(self, grace: float, before_kill: Callable[[], None] | None = None) -> bool:
        """Send TERM to the root, which stops its own children; then TERM and KILL to what is left of the family.

        Returns True when something had to be killed. It is safe to call this on a tree that is gone.
        """
        deadline = time.monotonic() + grace
        if before_kill is not None:
            before_kill()
        if self.poll() is None:
            send(self.identity, signal.SIGTERM)
            send(self.identity, signal.SIGCONT)  # a stopped process cannot act on TERM
            with contextlib.suppress(TimeoutError):
                # Not wait_for, which Python 3.11 lets go on when it is cancelled at the moment at which it ends.
                async with time_limit(max(0.0, deadline - time.monotonic())):
                    await self.wait()
        orphan_grace = min(_ORPHAN_GRACE_SECONDS, grace)
        cgroups = () if self._cgroup is None else (self._cgroup,)
        forced = await stop_family(self.family, orphan_grace=orphan_grace, before_kill=before_kill, cgroups=cgroups)
        with contextlib.suppress(TimeoutError):  # one that cannot end, or that a debugger holds until that has seen it
            async with time_limit(_EMPTY_SECONDS):
                await self.wait()
        if self._control is not None:
            self._control.close()
        if self._popen.stdin is not None:
            with contextlib.suppress(OSError):
                self._popen.stdin.close()
        return forced


def root_grace(seconds: float) -> float:
    """Return the grace for which `Child.stop` begins to kill the whole family within `seconds`."""
    return max(seconds / 2, seconds - _ORPHAN_GRACE_SECONDS)


async def stop_family(
    members: Callable[[], set[int]],
    *,
    orphan_grace: float,
    before_kill: Callable[[], None] | None = None,
    cgroups: Sequence[Cgroup] = (),
) -> bool:
    """Send TERM, wait for a short grace, then send KILL until `members` returns none, or for `_KILL_SECONDS`: there are
    some who cannot end. Those whom we may not signal are waited for `_REFUSED_SECONDS`, once no others are left.
    Returns True when KILL was needed. `cgroups`: all that is in them is of the family; each is removed at the end, and
    killed before it if a process has come meanwhile."""
    forced = False
    left = _identities(members())
    for member in left:
        send(member, signal.SIGTERM)
        send(member, signal.SIGCONT)
    deadline = time.monotonic() + orphan_grace
    while any(map(may_signal, left)) and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_SECONDS)
        left = _identities(members())
    began = time.monotonic()
    while left and time.monotonic() < began + (_KILL_SECONDS if any(map(may_signal, left)) else _REFUSED_SECONDS):
        forced = True
        if before_kill is not None:
            before_kill()
        for cgroup in cgroups:
            cgroup.kill()
        for member in left:
            send(member, signal.SIGKILL)
        await asyncio.sleep(_POLL_SECONDS)
        left = _identities(members())
    deadline = time.monotonic() + (_REFUSED_SECONDS if left else _EMPTY_SECONDS)
    while not all(cgroup.remove() for cgroup in cgroups) and time.monotonic() < deadline:
        for cgroup in cgroups:
            cgroup.kill()
        await asyncio.sleep(_POLL_SECONDS)
    return forced


def _identities(pids: Iterable[int]) -> list[ProcessId]:
    return [identity for pid in pids if (identity := procfs.identify(pid)) is not None and pid != os.getpid()]


def may_signal(target: ProcessId) -> bool:
    """Return False for a process of another user that we may not signal; True also once it is gone."""
    try:
        os.kill(target.pid, 0)
    except PermissionError:
        return False
    except ProcessLookupError:
        return True
    return True


def send(target: ProcessId, signum: signal.Signals) -> bool:
    """Signals exactly this process, never a later one with its PID (the pidfd pins it before the check)."""
    try:
        pidfd = os.pidfd_open(target.pid)
    except ProcessLookupError:
        return False
    try:
        if procfs.identify(target.pid) != target:
            return False
        signal.pidfd_send_signal(pidfd, signum)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(pidfd)
    return True


def pass_on(child: int, signums: Iterable[signal.Signals]) -> None:
    """Hand these signals on, from now on, to a child of this process that it has not waited for yet.

    Once the child was waited for they do nothing: its number may be another process's by then, and its pidfd is
    closed.
    """
    pidfd = os.pidfd_open(child)  # kept for as long as a signal may come, which is as long as we live

    def hand_on(signum: int, _: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signum)

    for signum in signums:
        signal.signal(signum, hand_on)


async def pid_end(pid: int) -> None:
    """Wait until the process has ended (no time when it is gone already)."""
    with contextlib.suppress(ProcessLookupError):
        await _pidfd_end(os.pidfd_open(pid))


async def process_end(target: ProcessId) -> None:
    """Wait for the end of exactly this process, which may have ended before: never of a later one with its PID."""
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(target.pid)
        if procfs.identify(target.pid) == target:
            await _pidfd_end(pidfd)
        else:
            os.close(pidfd)


async def _pidfd_end(pidfd: int) -> None:
    """Wait until the process of a pidfd has ended, and close the pidfd."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


def spawn(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    log: Path,
    marker: str,
    control_stdin: bool,
    cwd: Path | None = None,
    cpus: set[int] | None = None,
    cgroup: Cgroup | None = None,
) -> Child:
    """Starts a program in a session of its own, stdout and stderr appended to `log`. `cpus`: all that it may use; None:
    as we do. `cgroup`: its own from its birth; the child's stop kills whatever is in it.

    Raises OSError when the program cannot be executed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    inside = contextlib.nullcontext() if cgroup is None else cgroup.born_here()
    with log.open("ab") as sink, inside:
        popen = subprocess.Popen(
            list(argv),
            env={**env, MARKER: marker},
            cwd=cwd,
            stdin=subprocess.PIPE if control_stdin else subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    if cpus is not None and cpus != os.sched_getaffinity(0):
        # Its first thread is the only one yet; what it starts inherits.
        os.sched_setaffinity(popen.pid, cpus)
    return Child(popen, marker, cgroup)


def spawn_attached(argv: Sequence[str], *, env: Mapping[str, str], marker: str) -> Child:
    """Starts a program in a session of its own, with our stdin, stdout and stderr. Raises OSError when it cannot be
    executed."""
    return Child(subprocess.Popen(list(argv), env={**env, MARKER: marker}, start_new_session=True), marker)


def spawn_piped(argv: Sequence[str], *, env: Mapping[str, str], stderr: Path) -> subprocess.Popen[bytes]:
    """Starts a program in a session of its own with pipes on stdin and stdout: how an agent is started."""
    stderr.parent.mkdir(parents=True, exist_ok=True)
    with stderr.open("ab") as sink:
        return subprocess.Popen(
            list(argv),
            env=dict(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sink,
            start_new_session=True,
        )


class Output(NamedTuple):
    """The output of a short-lived tool. `code` None: it could not be run, took too long or wrote too much; `err` has
    which."""

    code: int | None
    out: str
    err: str


def output_of(
    argv: Sequence[str],
    *,
    timeout: float,
    cwd: Path | None = None,
    stdin: str = "",
    environ: Mapping[str, str] | None = None,
    own_session: bool = False,
) -> Output:
    """Runs a short-lived tool to its end; never raises for what the tool does. `timeout`: seconds, after which it is
    killed, as after `_OUTPUT_BYTES`. `environ` None: our own. `own_session`: our terminal's Ctrl-C does not end it."""
    try:
        tool = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            env=None if environ is None else dict(environ),
            start_new_session=own_session,
        )
    except OSError as error:
        return Output(None, "", error.strerror or str(error))
    with tool:
        try:
            deadline = time.monotonic() + timeout
            out, err = _talk(tool, stdin.encode(), deadline)
            code = tool.wait(max(0.0, deadline - time.monotonic()))
        except (TimeoutError, subprocess.TimeoutExpired):
            return Output(None, "", f"{LATE} {timeout:.0f} s")
        except _TooMuchError:
            return Output(None, "", f"more than {_OUTPUT_BYTES >> 20} MiB of output")
        finally:
            tool.kill()
    return Output(code, out.decode(errors="replace"), err.decode(errors="replace"))


class _TooMuchError(Exception):
    """A tool wrote more than the limit."""


def _talk(tool: subprocess.Popen[bytes], data: bytes, deadline: float) -> tuple[bytes, bytes]:
    """Write a tool's stdin, and read until it has closed its outputs. Raises TimeoutError and _TooMuchError."""
    assert tool.stdin is not None
    assert tool.stdout is not None
    assert tool.stderr is not None
    heard = {tool.stdout.fileno(): bytearray(), tool.stderr.fileno(): bytearray()}
    os.set_blocking(tool.stdin.fileno(), False)
    with selectors.DefaultSelector() as waiting:
        for output in heard:
            waiting.register(output, selectors.EVENT_READ)
        waiting.register(tool.stdin.fileno(), selectors.EVENT_WRITE)
        while waiting.get_map():
            if time.monotonic() >= deadline:
                raise TimeoutError
            for key, _ in waiting.select(deadline - time.monotonic()):
                if key.fd not in heard:
                    with contextlib.suppress(BrokenPipeError):  # it does not read, or has ended
                        if data := data[os.write(key.fd, data) :] if data else data:
                            continue
                    waiting.unregister(key.fd)
                    tool.stdin.close()
                elif part := os.read(key.fd, _PART_BYTES):
                    heard[key.fd] += part
                    if sum(map(len, heard.values())) > _OUTPUT_BYTES:
                        raise _TooMuchError
                else:
                    waiting.unregister(key.fd)
    out, err = map(bytes, heard.values())
    return out, err


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parent dies (an EngineCore whose API server was
    SIGKILLed), so that they can be found and stopped. Raises OSError where the kernel refuses."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signum: signal.Signals) -> None:
    """Have the kernel send us `signum` when our parent dies."""
    _prctl(_PR_SET_PDEATHSIG, int(signum))


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


MARKER = "PDSERVE_PROCESS"
"""Environment variable that every descendant inherits."""


def new_token() -> str:
    """Return the token of a new run."""
    return secrets.token_hex(16)


def marker(run_id: str, token: str, life: str) -> str:
    """Return the mark of a life of a process. `life`: `<process>.<number>`."""
    return f"{run_id}/{token}/{life}"


def holders(run_id: str, token: str) -> set[int]:
    """Return the live PIDs that carry a name of the run, in one reading."""
    begin = marker(run_id, token, "").encode()
    return {pid for pid, value in procfs.environment_values(MARKER).items() if value.startswith(begin)}


def share_of_cpus(cpus: Iterable[int], share: tuple[int, int] | None) -> set[int]:
    """Return the i-th of n equal parts of these CPUs, all of them without a share. With more parts than CPUs several
    parts are the same CPU."""
    every = sorted(cpus)
    if share is None:
        return set(every)
    part, parts = share
    if parts >= len(every):
        return {every[part % len(every)]}
    return set(every[part * len(every) // parts : (part + 1) * len(every) // parts])


def bring_back(pids: Iterable[int], cpus: set[int]) -> None:
    """Let threads of these processes that may run on other CPUs run on all of `cpus`, and on no other. Those that have
    chosen among `cpus`, as OpenMP's do, keep what they have chosen."""
    for thread in procfs.threads(pids):
        # One that has ended, or is not ours to move: that costs speed, not answers.
        with contextlib.suppress(OSError):
            if not os.sched_getaffinity(thread) <= cpus:
                os.sched_setaffinity(thread, cpus)
