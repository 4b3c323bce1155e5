"""The steps of a start, each of them against all that ends it: a death, a lateness, a long silence, a lost node, a
request to stop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Coroutine
from typing import Any, TypeVar

from pdserve.errors import StartError
from pdserve.launch.failure import start_error
from pdserve.launch.fleet import Fleet, Trouble
from pdserve.plan.process import Process
from pdserve.reach.protocol import Died, Gone, Health, Late
from pdserve.time_limit import time_limit

ResultT = TypeVar("ResultT")


class StopRequested(Exception):  # noqa: N818  (a signal or `down` asked for it)
    """The deployment is to stop."""


class StartRace:
    """Runs one start against what ends it. It owns the troubles of the fleet meanwhile."""

    def __init__(self, fleet: Fleet, starting: Collection[str], stop_asked: asyncio.Event) -> None:
        """Prepare the race. `starting`: names of the processes that are started; the others have served before."""
        self._fleet = fleet
        self._starting = starting
        self._stop_asked = stop_asked
        self.serving_troubles: list[Trouble] = []
        """What has ended it, if that befell a process that served: it is still to be reacted to."""

    async def run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run one step of the start. Raises StartError or StopRequested if that comes first."""
        step = asyncio.ensure_future(work)
        trouble = asyncio.ensure_future(self._first_trouble())
        silence = asyncio.ensure_future(self._first_long_silence())
        stop = asyncio.ensure_future(self._stop_asked.wait())
        racing: set[asyncio.Future[Any]] = {step, trouble, silence, stop}
        try:
            await asyncio.wait(racing, return_when=asyncio.FIRST_COMPLETED)
            if trouble.done():
                raise trouble.result()
            if silence.done():
                raise silence.result()
            if stop.done():
                raise StopRequested
            return step.result()
        finally:
            for task in racing:
                task.cancel()
            await asyncio.gather(*racing, return_exceptions=True)

    async def _first_trouble(self) -> StartError:
        while True:
            trouble = await self._fleet.troubles.get()
            if isinstance(trouble, Health):
                continue  # a starting neighbour may hold a CPU for seconds; only a long silence ends a start
            if isinstance(trouble, Gone) or self._is_dead(trouble.name):
                return self._error(trouble)

    def _is_dead(self, name: str) -> bool:
        """Leave out what befell an earlier life, or what this plan lacks."""
        return name in self._fleet.plan.names() and self._fleet.phase_of(name) == "dead"

    async def _first_long_silence(self) -> StartError:
        """Wait until a process that was ready before is silent for too long, and return the error: no other wait would
        end for it."""
        fleet, limit = self._fleet, self._fleet.plan.timeouts.unresponsive_seconds
        while True:
            changes = fleet.changes
            silent = [name for name in fleet.plan.names() if fleet.silent(name) and fleet.phase_of(name) == "degraded"]
            first = max(silent, key=fleet.silent_seconds, default=None)
            left = None if first is None else limit - fleet.silent_seconds(first)
            if first is not None and left is not None and left <= 0:
                why = fleet.state.processes[first].note
                shown = Health(name=first, responsive=False, why=f"{why}, for {limit:.0f} s")
                return self._error(fleet.give_up(first, why), shown)
            with contextlib.suppress(TimeoutError):
                async with time_limit(left):
                    await fleet.changed_since(changes)

    def _error(self, trouble: Trouble, shown: Trouble | None = None) -> StartError:
        served = self._befell_server(trouble)
        if served:
            self.serving_troubles.append(trouble)
        return start_error(shown or trouble, self._fleet.plan, self._fleet.run, served=served)

    def dead_of_starting(self) -> list[Process]:
        """Return the dead processes that are to be cleared up, but for those that served: their recovery does that."""
        served = {trouble.name for trouble in self.serving_troubles if not isinstance(trouble, Gone)}
        dead = [
            process for process in self._fleet.plan.processes if self._fleet.is_dead_with_pending_stop(process.name)
        ]
        return [process for process in dead if process.name not in served]

    def _befell_server(self, trouble: Trouble) -> bool:
        if not isinstance(trouble, Gone):
            # What an earlier start has left loading did not serve either.
            loading = isinstance(trouble, Late) or (isinstance(trouble, Died) and trouble.while_starting)
            return trouble.name not in self._starting and not loading
        there = {process.name for process in self._fleet.plan.processes if process.node == trouble.node}
        return not there <= set(self._starting)
