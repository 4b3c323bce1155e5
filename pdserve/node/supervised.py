"""One process in the hands of its agent: started, made ready, watched, stopped; every change is an event."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any

from pdserve.health import ProbeAnswer, Prober, wait_ready
from pdserve.logs import rotation
from pdserve.logs.lines import GrowingLog, last_lines, read_from
from pdserve.logs.progress import describe, is_fatal
from pdserve.logs.rotation import rotated_log
from pdserve.node import diagnostics
from pdserve.patches.mooncake.sockets import OUT_OF_SOCKETS
from pdserve.patches.record import merged_effects, read_records
from pdserve.plan.process import Env, ExitProbe, Process
from pdserve.reach.protocol import (
    Died,
    Event,
    Health,
    Late,
    LogCut,
    Progress,
    Ready,
    Sockets,
    Started,
    Stopped,
    Swapped,
)
from pdserve.system import procfs
from pdserve.system.cgroup import Cgroup, OomWatch
from pdserve.system.pressure import SWAPPED_ENOUGH, swapped_bytes
from pdserve.system.process import Child, bring_back, may_signal, pid_end, share_of_cpus, spawn, stop_family
from pdserve.system.shared_memory import ShmLedger

TAIL_LINES = 400
"""Of a log that go with a death. vLLM's own cause stands up to 200 of them before the end (logs/causes.py)."""
_TAIL_BYTES = 64 * 1024
_MIB = 1 << 20
_SIZE_SECONDS = 1.0
_CUT_AGAIN_SECONDS = 60.0
_FOLLOW_SECONDS = 0.5
_BEHIND_SECONDS = 0.02
_SILENT_SECONDS = 60.0
"""A loading engine writes several lines a minute: silence for longer is an event, so that slow differs from stalled."""
_FATAL_GRACE_SECONDS = 10.0
"""From the log line of a failed start to its report, should the process itself not end by then: vLLM's
worker can hang in the teardown of its KV transport for good."""
_WATCH_SECONDS = 2.0
_RETURN_SECONDS = 0.2
"""Between two looks at one that does not answer: no request is to be turned away once it does again."""
_UNRESPONSIVE_TRIES = 3
_FIRST_LOOKS, _LOOKS_AT_THE_SAME = 15, 5
"""Who belongs to a process hardly changes after the first looks, and finding out reads every process of the machine."""
_VITAL_MEMBER = "VLLM::"
"""vLLM titles its processes VLLM::EngineCore, VLLM::Worker...: without one of them an engine is dead, whatever its
API server still answers."""


class Supervised:
    """Owns one child. Everything that happens goes out through `emit`; nothing is decided here."""

    def __init__(
        self,
        plan: Process,
        *,
        run_dir: Path,
        marker: str,
        environ: Mapping[str, str],
        emit: Callable[[Event], None],
        ledger: ShmLedger,
        cgroup: Cgroup | None = None,
        fatal_grace: float = _FATAL_GRACE_SECONDS,
    ) -> None:
        """Prepare the process, and start nothing yet. `marker`: the name of this life (system/process.py). `cgroup`:
        the process's own; None: it has none. `fatal_grace`: seconds that a process which has logged its failure gets to
        end by itself."""
        self.plan = plan
        self._run_dir = run_dir
        self._marker = marker
        self._environ = environ
        self._emit = emit
        self._ledger = ledger
        self._cgroup = cgroup
        self._oom = OomWatch(cgroup)
        self._fatal_grace = fatal_grace
        self._log = run_dir / plan.log
        self._log_from = 0
        self._cut_from: int | None = None
        """Where this life begins in what was cut off of the log last; None: nothing of it was."""
        self._child: Child | None = None
        self._cpus: set[int] | None = None
        """Its part of them; None: it may use all."""
        self._death: asyncio.Future[Died] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self._ready = False
        self.done = False
        """It had one thing to do, and has ended with it done."""
        self._stopping = False
        self.left: tuple[int, ...] = ()
        """What its last stop could not end."""
        self._prober = Prober(self.family)

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def root_pid(self) -> int | None:
        """Return the PID whose exit code is ours to collect, until it was: then it may be another process's."""
        return None if self._child is None or self._child.reaped else self._child.pid

    def family(self) -> set[int]:
        """Return the live PIDs of the tree."""
        return set() if self._child is None or self.done else self._child.family()

    def start(self, secrets: Mapping[str, str], cpu_share: tuple[int, int] | None = None) -> None:
        """Spawns the process and begins to watch it. Failure to execute is reported as a death.
        `cpu_share` as in protocol.Start."""
        for relative, content in self.plan.files.items():
            (self._run_dir / relative).write_text(content, encoding="utf-8")
        self._log_from = self._log.stat().st_size if self._log.exists() else 0
        began = time.monotonic()
        if cpu_share is not None:
            self._cpus = share_of_cpus(os.sched_getaffinity(0), cpu_share)
        try:
            self._child = spawn(
                self.plan.argv,
                env=environment(self.plan.env, self._environ, secrets),
                log=self._log,
                marker=self._marker,
                control_stdin=self.plan.control == "stdin",
                cpus=self._cpus,
                cgroup=self._cgroup,
            )
        except OSError as error:
            self._emit(self._died(0, None, f"could not be executed: {error}", began, None))
            return
        self._emit(Started(name=self.name, id=self._child.identity))
        self._spawn_task(self._watch_exit(self._child))
        self._spawn_task(self._become_ready(self._child))
        self._spawn_task(self._bound_log())

    def push(self, about: str, line: str) -> None:
        """Writes a line to the process's stdin, as far as that reads; a process that no longer does is noted in the
        agent's log, and about to be reported as one that does not answer, or dead."""
        if self._child is not None:
            self._child.push(about, line, self._reads)

    def _reads(self, behind: bool) -> None:
        what = "does not read its control channel: it gets the newest states when it does" if behind else "reads again"
        _log(f"{self.name} {what}")

    async def stop(self, grace: float) -> None:
        """Ends the tree and reports Stopped. Its own death is no longer news from here on."""
        began = time.monotonic()
        self._stopping = True
        forced = False
        if self._child is not None and not self.done:
            forced = await self._child.stop(grace, before_kill=self.record_shm)
        elif self._cgroup is not None:
            await stop_family(self._cgroup.members, orphan_grace=0, cgroups=(self._cgroup,))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._prober.close()
        self._ledger.remove_orphans()
        # Who may not be signalled was not killed: nothing is known of what that holds.
        self.left = tuple(member.pid for member in procfs.identities(self.family()) if may_signal(member))
        self._emit(Stopped(name=self.name, forced=forced, seconds=time.monotonic() - began, left=self.left))

    def record_shm(self) -> None:
        """Notes the shared memory that the tree has mapped now."""
        self._ledger.record(self.family())

    def _spawn_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(report_failure)
        self._tasks.append(task)
        return task

    async def _watch_exit(self, child: Child) -> None:
        ended = await child.wait()
        if ended.code == 0 and isinstance(self.plan.probe, ExitProbe):
            self.done = True
            return
        self._report_death(child, child.pid, ended.code, str(ended))

    async def _watch_member(self, child: Child, pid: int, title: str) -> None:
        await pid_end(pid)
        self._report_death(child, pid, None, "ended", member=title)

    def _report_death(self, child: Child, pid: int, code: int | None, how: str, *, member: str | None = None) -> None:
        if self._stopping or self._death.done():
            return
        died = self._died(pid, code, how, child.started, member)
        self._death.set_result(died)
        self._emit(died)

    def _died(self, pid: int, code: int | None, how: str, began: float, member: str | None) -> Died:
        how, out_of_memory = self._oom.explain(how, code)
        return Died(
            name=self.name,
            pid=pid,
            code=code,
            how=how,
            out_of_memory=out_of_memory,
            seconds=round(time.monotonic() - began, 3),
            while_starting=not self._ready,
            member=member,
            log_tail=self.log_tail(),
        )

    async def _become_ready(self, child: Child) -> None:
        following = self._spawn_task(self._follow_log(child))
        try:
            waited = await wait_ready(
                self._probe, death=self._death, seconds=self.plan.ready_seconds, clock=time.monotonic
            )
        finally:
            # One that is never probed (a headless follower) counts as ready at once, and its log goes on to matter.
            if self.plan.probe is not None:
                following.cancel()
        if waited.died is not None or self._stopping:
            return
        if not waited.ready:
            file = Path("diagnostics") / f"{self.name}-{int(time.time())}.txt"
            missing = await diagnostics.snapshot(
                self.name, self.family(), self._run_dir / file, last_answer=waited.last_answer
            )
            if missing is not None:
                _log(f"{self.name}: diagnostics cannot be written: {missing}")
            self._emit(
                Late(
                    name=self.name,
                    seconds=waited.seconds,
                    last_answer=waited.last_answer,
                    diagnostics=str(file) if missing is None else None,
                    log_tail=self.log_tail(),
                )
            )
            return
        self._ready = True
        if self.done:
            self._emit(Ready(name=self.name, seconds=time.monotonic() - child.started))
            return
        family = self.family()
        # Who hears that it is ready may end its container at once, and a busy agent looks for segments seconds later.
        self._ledger.record(family)
        if self._cpus is not None:
            # NIXL on CPU binds the main thread of every worker to the last core of each NUMA node, the same for all
            # engines of a machine (nixl/base_worker.py of vLLM 0.32). Can go when it looks at its own affinity.
            bring_back(family, self._cpus)
        pinned = set(self.plan.ports.values())
        other_ports = {
            f"{port} {procfs.command(pid)[:40]} ({pid})": port
            for port, pid in sorted(procfs.listening_ports(family).items())
            if port not in pinned
        }
        self._emit(Ready(name=self.name, seconds=time.monotonic() - child.started, ports=other_ports))
        for pid in family - {child.pid}:
            if (title := procfs.process_title(pid)).startswith(_VITAL_MEMBER):
                self._spawn_task(self._watch_member(child, pid, title))
        await self._watch_health(child)

    async def _watch_health(self, child: Child) -> None:
        """Watch a process while it serves: is it stopped, does it still answer, has it sockets and memory? Only changes
        are events."""
        failures, responsive = 0, True
        records = self.plan.env.set.get("PDSERVE_PATCH_RECORD")
        shortage = SocketShortage(Path(records)) if records and self.plan.patches else None
        swap = SwapUse()
        for looks in itertools.count():
            if looks < _FIRST_LOOKS or looks % _LOOKS_AT_THE_SAME == 0:
                members = procfs.identities(self.family())
            await asyncio.sleep(_WATCH_SECONDS if responsive else _RETURN_SECONDS)
            held = [member.pid for member in members if procfs.is_stopped(member)]
            answer = ProbeAnswer(False, f"PID {held[0]} is stopped (SIGSTOP)") if held else await self._probe()
            failures = 0 if answer.ready else failures + 1
            if answer.ready and not responsive:
                responsive = True
                self._emit(Health(name=self.name, responsive=True))
            elif responsive and (held or failures >= _UNRESPONSIVE_TRIES):
                responsive = False
                self._emit(Health(name=self.name, responsive=False, why=answer.text))
            if shortage is not None and shortage.look():
                self._emit(Sockets(name=self.name, short=shortage.lasts, times=shortage.times))
            if swap.look(member.pid for member in members):
                self._emit(Swapped(name=self.name, bytes=swap.swapped, read_back=swap.read_back))

    async def _probe(self) -> ProbeAnswer:
        if self.plan.probe is None:
            return ProbeAnswer(True, "not probed")
        if isinstance(self.plan.probe, ExitProbe):
            return ProbeAnswer(self.done, "it still runs")
        return await self._prober.check(self.plan.probe)

    async def _follow_log(self, child: Child) -> None:
        """Turns lines of the log into Progress events; the text, not the speed, is the news. Its failure is a death,
        even if it does not die: a wait for it would last for the limit of the whole stage."""
        log, last_text, last_line = GrowingLog(self._log, self._log_from), "", time.monotonic()
        failed_at: float | None = None
        while True:
            lines = log.step()
            if lines or self._ready:  # silence is news of a start alone
                last_line = time.monotonic()
            elif time.monotonic() - last_line >= _SILENT_SECONDS:
                self._emit(
                    Progress(
                        name=self.name, text=f"silent for {_SILENT_SECONDS:.0f} s (last: {last_text or 'nothing'})"
                    )
                )
                last_line = time.monotonic()
            for line in lines:
                if (text := describe(line)) and text != last_text:
                    last_text = text
                    self._emit(Progress(name=self.name, text=text))
                # Others are served between two lines: a chatty engine must not delay the news of another one's death.
                await asyncio.sleep(0)
            if failed_at is None and any(map(is_fatal, lines)):
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at >= self._fatal_grace:
                self._report_death(child, child.pid, None, "engine core failed; its processes did not end")
                return
            await asyncio.sleep(_BEHIND_SECONDS if log.behind else _FOLLOW_SECONDS)

    def log_tail(self) -> tuple[str, ...]:
        """Return the last lines that THIS process wrote, without what each request of a dead engine repeats: the log
        may begin with an earlier life of it."""
        return last_lines(self._end, TAIL_LINES, _TAIL_BYTES)

    def _end(self, limit: int) -> bytes:
        data = _end_of(self._log, self._log_from, limit)
        if self._cut_from is not None and len(data) < limit:
            data = _end_of(rotated_log(self._log), self._cut_from, limit - len(data)) + data
        return data

    async def _bound_log(self) -> None:
        """Cuts the log whenever it is too large, for as long as the process lives."""
        limit, keep = self.plan.logs.max_mib * _MIB, self.plan.logs.keep
        while limit and not self.done:
            await asyncio.sleep(_SIZE_SECONDS)
            try:
                if self._log.stat().st_size <= limit:
                    continue
                await self._cut_log(keep)
            except OSError as error:
                _log(f"{self._log} cannot be cut: {error}")
                await asyncio.sleep(_CUT_AGAIN_SECONDS)

    async def _cut_log(self, keep: int) -> None:
        """Cut the log. Nothing is awaited between a cut and what is known of it: see `log_tail`."""
        dropped = await rotation.cut(self._log, keep)
        self._cut_from, self._log_from = (self._log_from if keep and dropped is None else None), 0
        if dropped is not None:
            lost, error = dropped
            self._emit(LogCut(name=self.name, lost=lost, why=error.strerror or str(error)))


def _log(text: str) -> None:
    """Write to the agent's own log. What cannot be written there must end no watch."""
    with contextlib.suppress(OSError):  # no reader, or its disk is full too
        print(text, file=sys.stderr, flush=True)


def _end_of(log: Path, start: int, limit: int) -> bytes:
    """Return the last bytes of a log, none from before `start`."""
    try:
        size = log.stat().st_size
    except OSError:
        return b""
    return read_from(log, max(start, size - limit), limit) or b""


def environment(rule: Env, inherited: Mapping[str, str], secrets: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that a rule of the plan means on this node."""
    base = {name: value for name, value in inherited.items() if rule.inherits(name)}
    return {**base, **rule.set, **secrets}


def report_failure(task: asyncio.Task[None]) -> None:
    """Log the fault of a task that is not awaited: a watch that has ended by a fault of ours must not be missed in
    silence. It goes to the agent's log, with its traceback."""
    if not task.cancelled() and (error := task.exception()) is not None:
        about = {"message": f"{task.get_coro()} has failed", "exception": error, "task": task}
        task.get_loop().call_exception_handler(about)


def reap_adopted(own: Iterable[int | None]) -> None:
    """Collects orphans that were re-parented to us and have ended; never a child that is waited for."""
    roots = set(own)
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid in roots:
            return
        os.waitpid(ended.si_pid, 0)


_LOOK_SECONDS = 10.0
"""Between two looks: each reads a file of every member of the tree."""
_READ_BACK = "pswpin"
"""Of /proc/vmstat: pages that were read from swap since boot."""


class SwapUse:
    """Measures the swap of one process tree, look by look."""

    def __init__(self, *, proc: Path = Path("/proc"), clock: Callable[[], float] = time.monotonic) -> None:
        self._proc = proc
        self._clock = clock
        self._next = clock()
        self._from = self._pages_read()
        self._told = SWAPPED_ENOUGH // 2
        self.swapped = 0
        """Bytes of the tree in swap, at the last look."""

    @property
    def read_back(self) -> int:
        """Return the bytes that all processes of the node have read from swap since this was made: what is swapped out
        and never read again slows nothing down."""
        return max(0, self._pages_read() - self._from) * os.sysconf("SC_PAGE_SIZE")

    def look(self, pids: Iterable[int]) -> bool:
        """Look again; True for news: enough for the first time, or twice what it was then."""
        now = self._clock()
        if now < self._next:
            return False
        self._next = now + _LOOK_SECONDS
        if not self._has_swap():
            return False
        self.swapped = swapped_bytes(pids, self._proc)
        if self.swapped < 2 * self._told:
            return False
        self._told = self.swapped
        return True

    def _has_swap(self) -> bool:
        """Tell whether the node has swap: /proc/swaps has a line for each swap device below its title."""
        try:
            return len(procfs.lines_of(self._proc / "swaps")) > 1
        except OSError:
            return False

    def _pages_read(self) -> int:
        try:
            lines = procfs.lines_of(self._proc / "vmstat")
        except OSError:
            return 0
        found = (line.partition(" ")[2] for line in lines if line.startswith(f"{_READ_BACK} "))
        return next((int(text) for text in found if text.isdecimal()), 0)


QUIET_SECONDS = 10.0
"""Without a new lack: a shortage is one event, however many requests it fails."""


class SocketShortage:
    """Counts for one engine, look by look."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin to look for a shortage of sockets. `folder`: where the engine's processes leave their records."""
        self._folder = folder
        self._clock = clock
        self._times = 0.0
        self._last_rise: float | None = None

    @property
    def lasts(self) -> bool:
        return self._last_rise is not None

    @property
    def times(self) -> int:
        """Count how often there was no socket, since the engine was started."""
        return int(self._times)

    def look(self) -> bool:
        """Look again; True if a shortage has begun, or ended, since the last time."""
        counted = merged_effects(read_records(self._folder)).values()
        before, self._times = self._times, sum(effects.get(OUT_OF_SOCKETS, 0) for effects in counted)
        lasted, now = self.lasts, self._clock()
        if self._times > before:
            self._last_rise = now
        elif self._last_rise is not None and now - self._last_rise >= QUIET_SECONDS:
            self._last_rise = None
        return self.lasts != lasted
