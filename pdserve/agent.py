"""The node agent: owns the processes of one node, obeys the launcher over the pipe that started it.

Run as `python -m pdserve.agent`. It is two processes: a guard, which only waits, and the agent, its child.

- The launcher dies: the pipe closes, the agent stops everything in stop order and leaves.
- The agent dies: its children fall to the guard (a child subreaper), which stops them all.
- Both die: the guard sees the agent's end and does the same.
- The guard dies: the kernel sends the agent a TERM, and it stops everything.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Coroutine, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from pdserve import procfs
from pdserve.errors import AgentProtocolError
from pdserve.process import adopt_orphans, die_with_parent, stop_family
from pdserve.protocol import Died, Event, Hello, Push, Shutdown, Start, Stop, Stopped, decode_order, encode
from pdserve.shm import ShmLedger, existing
from pdserve.supervised import Supervised, reap_adopted

_SWEEP_SECONDS = 1.0
_GUARD_GRACE_SECONDS = 5.0


class Agent:
    """One node's processes. Single threaded; every method runs in the event loop."""

    def __init__(self, *, node: str, run_dir: Path, run_id: str, ledger: ShmLedger) -> None:
        self._node = node
        self._run_dir = run_dir
        self._run_id = run_id
        self._ledger = ledger
        self._processes: dict[str, Supervised] = {}
        self._stops: set[asyncio.Task[None]] = set()
        self._leave = asyncio.Event()
        self._pipe_open = True

    async def serve(self) -> None:
        """Obeys until the pipe closes, a signal arrives or the launcher says so; then stops everything."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(signum, self._leave.set)
        orders = asyncio.StreamReader(limit=64 * 1024 * 1024)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin.buffer)
        guard, agent = procfs.identify(os.getppid()), procfs.identify(os.getpid())
        assert guard is not None
        assert agent is not None
        self._emit(Hello(node=self._node, agent=agent, guard=guard))
        background = [asyncio.create_task(self._obey(orders)), asyncio.create_task(self._sweep())]
        await self._leave.wait()
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await self._stop_everything()

    async def _obey(self, orders: asyncio.StreamReader) -> None:
        try:
            while line := await orders.readline():
                order = decode_order(line)
                match order:
                    case Start():
                        self._start(order)
                    case Stop():
                        self._track(self._stop(order.name, order.grace))
                    case Push():
                        if order.name in self._processes:
                            self._processes[order.name].push(order.line)
                    case Shutdown():
                        break
        except AgentProtocolError as error:
            # Not obeying any further is the only safe answer: the launcher sees the pipe close.
            print(error.render(), file=sys.stderr)
        finally:
            self._leave.set()

    def _start(self, order: Start) -> None:
        process = Supervised(
            order.process,
            run_dir=self._run_dir,
            run_id=self._run_id,
            environ=os.environ,
            emit=self._emit,
            ledger=self._ledger,
        )
        self._processes[process.name] = process
        try:
            process.start(order.secrets)
        except OSError as error:  # its files or its log cannot be written: a full disk, a deleted run directory
            how = f"could not be started: {error}"
            self._emit(Died(name=process.name, pid=0, code=None, how=how, seconds=0.0, while_starting=True))

    async def _stop(self, name: str, grace: float) -> None:
        process = self._processes.get(name)
        if process is None:
            self._emit(Stopped(name=name, forced=False, seconds=0.0))
            return
        await process.stop(grace)
        if self._processes.get(name) is process:
            del self._processes[name]

    def _track(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._stops.add(task)
        task.add_done_callback(self._stops.discard)

    async def _stop_everything(self) -> None:
        order = sorted(self._processes.values(), key=lambda process: process.plan.stop_stage)
        for _, stage in groupby(order, key=lambda process: process.plan.stop_stage):
            await asyncio.gather(*(process.stop(process.plan.stop_seconds) for process in stage))
        await asyncio.gather(*self._stops, return_exceptions=True)
        self._ledger.remove_orphans()

    async def _sweep(self) -> None:
        """Notes shared memory while its owners live, and collects adopted orphans."""
        while True:
            for process in list(self._processes.values()):
                process.record_shm()
            reap_adopted(process.root_pid for process in self._processes.values())
            await asyncio.sleep(_SWEEP_SECONDS)

    def _emit(self, event: Event) -> None:
        if not self._pipe_open:
            return
        try:
            sys.stdout.buffer.write(encode(event))
            sys.stdout.buffer.flush()
        except OSError:
            # The launcher is gone; its pipe's other half will say so and everything is stopped.
            self._pipe_open = False


def guard(agent_pid: int, ledger_file: Path, strangers: Mapping[str, int]) -> int:
    """Waits for the agent and finishes its work if it was killed. Returns the exit code for the pipe's owner."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # Stopping is the agent's work; a guard that leaves early would orphan what it guards.
        signal.signal(signum, lambda number, _frame: os.kill(agent_pid, number))
    # The pipe is the agent's: a guard that holds it open would hide the agent's death from the launcher.
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, 0)
    os.dup2(devnull, 1)
    while True:
        pid, status = os.wait()
        if pid == agent_pid:
            break
    ledger = ShmLedger(ledger_file, strangers=strangers)

    def members() -> set[int]:
        reap_adopted(())
        found = procfs.descendants(os.getpid())
        ledger.record(found)
        return found

    asyncio.run(stop_family(members, orphan_grace=_GUARD_GRACE_SECONDS))
    ledger.remove_orphans()
    return os.waitstatus_to_exitcode(status) and 1


def main() -> int:
    """Entry. Forks before any thread exists; the child is the agent."""
    parser = argparse.ArgumentParser(prog="python -m pdserve.agent", description="The node agent of pdserve.")
    parser.add_argument("--node", required=True)
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--run-id", required=True)
    options = parser.parse_args()
    strangers = existing()
    ledger_file = options.run_dir / f"shm@{options.node}.json"
    ShmLedger(ledger_file, strangers=strangers).save()
    adopt_orphans()
    if child := os.fork():
        return guard(child, ledger_file, strangers)
    die_with_parent(signal.SIGTERM)
    adopt_orphans()
    ledger = ShmLedger(ledger_file, strangers=strangers)
    asyncio.run(Agent(node=options.node, run_dir=options.run_dir, run_id=options.run_id, ledger=ledger).serve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
