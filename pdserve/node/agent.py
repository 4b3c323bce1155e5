"""The node agent: owns the processes of one node, obeys the launcher over the pipe that started it.

Run as `python -m pdserve.node.agent`. It is two processes: a guard, which only waits, and the agent, its child.

- The launcher dies: the pipe closes, the agent stops everything in stop order and leaves.
- The agent dies: its children fall to the guard (a child subreaper), which stops them all.
- Both die: the guard sees the agent's end and does the same.
- The guard dies: the kernel sends the agent a TERM, and it stops everything.
- The network is cut: no pipe closes; an agent with a lease that hears nothing for its length stops everything too.

A TERM that reaches the agent itself comes from the node's owner (scancel, the end of a container), who kills what is
left after a time of his own: `--term-seconds` is what all stops together may then take.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import math
import os
import signal
import socket
import sys
from collections.abc import Coroutine, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, assert_never

from pdserve.errors import AgentProtocolError
from pdserve.node import agent_record
from pdserve.node.agent_record import ledger_file
from pdserve.node.http_request import NodeHttp
from pdserve.node.supervised import Supervised, reap_adopted, report_failure
from pdserve.reach.protocol import (
    STOPPED,
    AgentMessage,
    Ask,
    Beat,
    Because,
    Died,
    Hello,
    Leaving,
    Progress,
    Pulse,
    Push,
    Shutdown,
    SignalReceived,
    Start,
    Stop,
    Stopped,
    decode_order,
    line_of,
)
from pdserve.reach.slurm import without_slurm
from pdserve.system import cgroup, procfs, queued_output
from pdserve.system.pipe_writer import PipeWriter
from pdserve.system.process import Exit, adopt_orphans, die_with_parent, marker, pass_on, root_grace, stop_family
from pdserve.system.shared_memory import ShmLedger, segment_inodes
from pdserve.time_limit import time_limit

_SWEEP_SECONDS = 1.0
_REST_TIMES = 20.0
"""How much longer than a look the pause after it is, at least: a look reads what each of our processes has mapped."""
_GUARD_GRACE_SECONDS = 5.0
_MANY_BYTES = 1024 * 1024
_FAREWELL_SECONDS = 2.0
"""How long a leaving agent waits for its last events to be taken."""


class Agent:
    """Owns the processes of one node. It is single threaded; every method runs in the event loop."""

    def __init__(
        self,
        *,
        node: str,
        run_dir: Path,
        run_id: str,
        ledger: ShmLedger,
        cgroups: cgroup.CgroupOutcome,
        lease: float | None = None,
        pulse: float | None = None,
        term_seconds: float | None = None,
    ) -> None:
        """Begin with no process. `cgroups`: where those of the processes are made. `lease`, `pulse`: seconds; None on
        the launcher's own machine."""
        self._node = node
        self._lease = lease
        self._pulse = pulse
        self._term_seconds = term_seconds
        self._stop_by: float | None = None
        self._guard = os.getppid()
        self._environ = without_slurm(os.environ)
        self._http = NodeHttp()
        self._run_dir = run_dir
        self._run_id = run_id
        self._ledger = ledger
        self._cgroups = cgroups
        self._lives = itertools.count(1)
        self._processes: dict[str, Supervised] = {}
        self._stops: set[asyncio.Task[None]] = set()
        self._asks: set[asyncio.Task[None]] = set()
        self._leave = asyncio.Event()
        self._writer = PipeWriter(sys.stdout.fileno())
        self._behind = False

    async def serve(self) -> None:
        """Obeys until the pipe closes, a signal arrives or the launcher orders it; then stops everything."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(signum, self._on_signal, signum)
        orders = asyncio.StreamReader(limit=64 * 1024 * 1024)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin.buffer)
        guard, agent = procfs.identify(self._guard), procfs.identify(os.getpid())
        assert guard is not None
        assert agent is not None
        made, why_not = self._cgroups
        self._emit(
            Hello(
                node=self._node,
                agent=agent,
                guard=guard,
                hostname=socket.gethostname(),
                place=procfs.place(),
                cgroup=None if made is None else made.id,
                no_cgroup=why_not,
            )
        )
        self._heard = loop.time()
        background = [asyncio.create_task(self._obey(orders)), asyncio.create_task(self._sweep())]
        for task in background:
            task.add_done_callback(report_failure)
        touch = []
        if self._pulse is not None and self._lease is not None:
            touch.append(asyncio.create_task(self._keep_in_touch(self._pulse, self._lease)))
        await self._leave.wait()
        await _end([*background, *self._asks])  # an answer that is long in coming must not delay a stop
        await self._stop_everything()
        await _end(touch)  # not before: an agent that is busy with stops is not lost
        await self._http.close()
        with contextlib.suppress(TimeoutError):
            async with time_limit(_FAREWELL_SECONDS):
                await self._writer.sent()

    def _on_signal(self, signum: signal.Signals) -> None:
        if self._term_seconds is not None and self._stop_by is None:
            self._stop_by = asyncio.get_running_loop().time() + self._term_seconds
            self._emit(SignalReceived(node=self._node, signal=signum.name))
        elif self._term_seconds is None and not self._leave.is_set():
            killed = os.getppid() != self._guard  # the kernel's TERM, see die_with_parent
            self._begin_leaving("signal", "its guard was killed" if killed else f"it received {signum.name}")
        self._leave.set()

    def _begin_leaving(self, because: Because, how: str) -> None:
        """Begin to leave. The reason goes over the pipe, if that still leads anywhere, and to the log in any case."""
        _log(f"{how}: stopping everything")
        self._emit(Leaving(because=because, how=how))
        self._leave.set()

    async def _keep_in_touch(self, pulse: float, lease: float) -> None:
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            self._emit(Pulse())
            await asyncio.sleep(pulse)
            # Time in which this node itself was held is no silence of the launcher.
            self._heard += max(0.0, loop.time() - before - 2 * pulse)
            if not self._leave.is_set() and loop.time() - self._heard > lease:
                self._begin_leaving("lease", f"it heard nothing from the launcher for {lease:g} s, its lease")

    async def _obey(self, orders: asyncio.StreamReader) -> None:
        try:
            while line := await orders.readline():
                order = decode_order(line)
                self._heard = asyncio.get_running_loop().time()
                match order:
                    case Beat():
                        pass
                    case Ask():
                        self._track(self._ask(order), self._asks)
                    case Start():
                        self._start(order)
                    case Stop():
                        self._track(self._stop(order.name, order.grace), self._stops)
                    case Push():
                        if order.name in self._processes:
                            self._processes[order.name].push(order.about, order.line)
                    case Shutdown():
                        break
                    case _:
                        assert_never(order)
        except AgentProtocolError as error:
            # Not obeying any further is the only safe answer: the launcher sees the pipe close.
            print(error.render(), file=sys.stderr)
        finally:
            self._leave.set()

    async def _ask(self, order: Ask) -> None:
        self._emit(await self._http.answer(order))

    def _start(self, order: Start) -> None:
        name = order.process.name
        earlier = self._processes.get(name)
        if earlier is not None and (earlier.root_pid is not None or earlier.left):
            # With its place it would lose the only one who can stop it. What is left of a dead one ends with the agent.
            how = "could not be started: an earlier life of it was not stopped"
            self._emit(Died(name=name, pid=0, code=None, how=how, seconds=0.0, while_starting=True))
            return
        try:
            # Other ones for each life: what is slow to end of the last one must not take this one with it.
            life = f"{name}.{next(self._lives)}"
            made = self._cgroups.cgroup
            own = None if made is None else made.new(life)
            process = Supervised(
                order.process,
                run_dir=self._run_dir,
                marker=marker(self._run_id, order.token, life),
                environ=self._environ,
                emit=self._emit,
                ledger=self._ledger,
                cgroup=own,
            )
            self._processes[name] = process
            process.start(order.secrets, order.cpu_share)
        except OSError as error:  # its files or its log cannot be written: a full disk, a deleted run directory
            how = f"could not be started: {error}"
            self._emit(Died(name=name, pid=0, code=None, how=how, seconds=0.0, while_starting=True))

    async def _stop(self, name: str, grace: float) -> None:
        process = self._processes.get(name)
        if process is None:
            self._emit(Stopped(name=name, forced=False, seconds=0.0))
            return
        await process.stop(grace)
        if self._processes.get(name) is process and not process.left:
            del self._processes[name]

    def _track(self, work: Coroutine[Any, Any, None], among: set[asyncio.Task[None]]) -> None:
        task = asyncio.create_task(work)
        among.add(task)
        task.add_done_callback(among.discard)
        task.add_done_callback(report_failure)

    async def _stop_everything(self) -> None:
        """Stop all in order. With an end set from outside, each stage gets its part of what is left."""
        # What a stop could not end is killed once more with all the rest, below.
        living = [process for process in self._processes.values() if not process.done and not process.left]
        order = sorted(living, key=lambda process: process.plan.stop_stage)
        stages = [list(stage) for _, stage in groupby(order, key=lambda process: process.plan.stop_stage)]
        for index, stage in enumerate(stages):
            limit = math.inf
            if self._stop_by is not None:
                left = self._stop_by - asyncio.get_running_loop().time()
                limit = root_grace(max(0.0, left / (len(stages) - index)))
            await asyncio.gather(*(process.stop(min(process.plan.stop_seconds, limit)) for process in stage))
        await asyncio.gather(*self._stops, return_exceptions=True)
        if (made := self._cgroups.cgroup) is not None:  # what one that is done has left; and the guard may be dead
            await stop_family(made.members, orphan_grace=0, cgroups=(made,))
        # What belongs to none of them any more would fall to the guard, which may be dead.
        await stop_family(self._all_below, orphan_grace=0)
        self._ledger.remove_orphans()

    def _all_below(self) -> set[int]:
        below = procfs.descendants(os.getpid())
        self._ledger.record(below)
        return below

    async def _sweep(self) -> None:
        """Notes shared memory while its owners live, and collects adopted orphans."""
        clock = asyncio.get_running_loop().time
        while True:
            began = clock()
            if self._ledger.unknown():
                # Orphans are still descendants, adopted by us.
                self._ledger.record(procfs.descendants(os.getpid()))
            reap_adopted(process.root_pid for process in self._processes.values())
            await asyncio.sleep(max(_SWEEP_SECONDS, _REST_TIMES * (clock() - began)))

    def _emit(self, event: AgentMessage) -> None:
        """Send an event. It waits for a launcher that does not read (one that is held in a debugger); those that a
        later one of their kind makes worthless do not, once there are many."""
        behind = self._writer.waiting > _MANY_BYTES
        if behind != self._behind:
            self._behind = behind
            _log("the launcher does not read: its news wait here" if behind else "the launcher reads again")
        if behind and isinstance(event, Pulse | Progress):
            return
        self._writer.write(line_of(event))


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def guard(agent_pid: int, run_dir: Path, node: str, *, strangers: Mapping[str, int], made: cgroup.Cgroup | None) -> int:
    """Waits for the agent and finishes its work if it was killed. Returns the exit code for the pipe's owner.
    `made`: the cgroup in which the agent's processes have theirs; it is removed with all that is in it."""
    # Stopping is the agent's work, and then ours; a guard that leaves early would orphan what it guards.
    pass_on(agent_pid, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    status = _end_of(agent_pid)
    if os.WIFSIGNALED(status):
        _report_killed(Exit(os.waitstatus_to_exitcode(status)))
    # The pipe was the agent's: a guard that held it open would hide the agent's end from the launcher.
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, 0)
    os.dup2(devnull, 1)
    ledger = ShmLedger(ledger_file(run_dir, node), strangers=strangers)

    def members() -> set[int]:
        reap_adopted(())
        inside = set() if made is None else made.members()
        pids = procfs.family({os.getpid()} | inside) - {os.getpid()}
        ledger.record(pids)
        return pids

    cgroups = () if made is None else (made,)
    asyncio.run(stop_family(members, orphan_grace=_GUARD_GRACE_SECONDS, cgroups=cgroups))
    ledger.remove_orphans()
    if not members():
        agent_record.note(run_dir, node, made, over=True)
    return os.waitstatus_to_exitcode(status) and 1


def _end_of(agent_pid: int) -> int:
    """Wait for the agent, and return the status with which it ended. What held it meanwhile goes to the log, for who
    asks why it was not heard."""
    while True:
        pid, status = os.waitpid(-1, os.WUNTRACED | os.WCONTINUED)
        if pid != agent_pid:
            continue
        if os.WIFSTOPPED(status):
            _log(f"{STOPPED} {signal.Signals(os.WSTOPSIG(status)).name}")
        elif os.WIFCONTINUED(status):
            _log("the agent runs again")
        else:
            return status


def _log(text: str) -> None:
    with contextlib.suppress(OSError):  # its reader has gone
        print(text, file=sys.stderr, flush=True)


def _report_killed(how: Exit) -> None:
    """Write to the log, and in the agent's place over its pipe."""
    _log(f"the agent was {how}: its guard stops what it owned")
    with contextlib.suppress(OSError):
        os.write(1, line_of(Leaving(because="killed", how=f"it was {how}")))


def main() -> int:
    """Run the agent and its guard. The fork comes before any thread exists; the child is the agent."""
    queued_output.ensure_utf8()
    parser = argparse.ArgumentParser(prog="python -m pdserve.node.agent", description="The node agent of pdserve.")
    parser.add_argument("--node", required=True)
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--lease", type=float, help="seconds without a word from the launcher; then everything stops")
    parser.add_argument("--pulse", type=float, help="seconds between signs of life")
    parser.add_argument("--term-seconds", type=float, help="what all stops may take after a TERM from outside")
    options = parser.parse_args()
    strangers = segment_inodes()
    kept = ledger_file(options.run_dir, options.node)
    ShmLedger(kept, strangers=strangers).save()
    adopt_orphans()
    cgroups = cgroup.make_own_cgroup(f"{cgroup.prefix(options.run_id)}{options.node}-{os.getpid()}", os.environ)
    agent_record.note(options.run_dir, options.node, cgroups.cgroup)
    guard_pid = os.getpid()
    if child := os.fork():
        return guard(child, options.run_dir, options.node, strangers=strangers, made=cgroups.cgroup)
    die_with_parent(signal.SIGTERM)
    if os.getppid() != guard_pid:  # it was gone before we asked to hear of that
        return 1
    adopt_orphans()
    ledger = ShmLedger(kept, strangers=strangers)
    asyncio.run(serve(options, ledger, cgroups))
    return 0


async def serve(options: argparse.Namespace, ledger: ShmLedger, cgroups: cgroup.CgroupOutcome) -> None:
    """Live the agent's whole life, in its event loop."""
    agent = Agent(
        node=options.node,
        run_dir=options.run_dir,
        run_id=options.run_id,
        ledger=ledger,
        cgroups=cgroups,
        lease=options.lease,
        pulse=options.pulse,
        term_seconds=options.term_seconds,
    )
    await agent.serve()


if __name__ == "__main__":
    sys.exit(main())
