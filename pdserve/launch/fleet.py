"""The launcher's hands and eyes: starts and stops processes through the agents, and keeps the recorded state true.

Decides nothing. Every event of an agent is applied to the state, written to the history, sent to the proxy where it
concerns routing, and then queued for the launcher to decide (`troubles`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, assert_never

from pdserve.logs.causes import history_fields
from pdserve.plan.model import Plan, cpu_share
from pdserve.plan.process import ExitProbe, Process
from pdserve.reach.link import AgentLink
from pdserve.reach.protocol import (
    Answered,
    AskNode,
    Died,
    Event,
    Gone,
    Health,
    Hello,
    Late,
    LogCut,
    Method,
    Progress,
    Push,
    Ready,
    SignalReceived,
    Sockets,
    Start,
    Started,
    Stop,
    Stopped,
    Swapped,
)
from pdserve.run.directory import RunDir
from pdserve.run.patch_proof import forget
from pdserve.run.state import DeploymentState, NodeState, ProcessPhase, ProcessState
from pdserve.time_limit import time_limit

ANSWER_SECONDS = 60.0
"""Behind its grace a stop has so long to be answered: the KILL of what cannot end. Then its agent has failed at it, and
the next stop is an order of its own."""


@dataclass
class _Stopping:
    """Stops of one process that its agent has not answered yet: it answers each of them."""

    then: ProcessPhase
    """What the process is once they are answered."""
    until: float
    """When the shortest grace is over (time.monotonic)."""
    orders: int = 1


class PendingStops:
    """Names of processes that were started, or ordered to stop, and whose stop was not answered since. Whatever their
    phase, what is left of them may hold a port or a device."""

    def __init__(self) -> None:
        self._nodes: dict[str, str] = {}
        self._stopping: dict[str, _Stopping] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._nodes

    def started(self, name: str, node: str) -> None:
        """A start was ordered."""
        self._nodes[name] = node

    def order_stop(self, name: str, node: str, grace: float, then: ProcessPhase) -> bool:
        """True: a stop is to be sent. False: one was sent that comes to its end as soon as this one would."""
        until = time.monotonic() + grace
        stopping = self._stopping.get(name)
        if stopping is None or time.monotonic() > stopping.until + ANSWER_SECONDS:
            self._stopping[name] = _Stopping(then, until)
        elif until < stopping.until:
            stopping.until, stopping.orders = until, stopping.orders + 1
        else:
            return False
        self._nodes[name] = node
        return True

    def is_stopping(self, name: str) -> bool:
        """True while a stop is not answered."""
        return name in self._stopping

    def stopped(self, name: str, *, left: bool = False) -> ProcessPhase:
        """A stop was answered, or an agent has stopped it by itself. Returns what the process is now. `left`: something
        of it lives, which no KILL ends: another stop may find that gone."""
        stopping = self._stopping.get(name)
        if stopping is not None and stopping.orders > 1:
            stopping.orders -= 1
            return stopping.then
        if left:
            self._stopping.pop(name, None)
        else:
            self.done(name)
        return "stopped" if stopping is None else stopping.then

    def done(self, name: str) -> None:
        """It has ended by itself, with all that it had to do."""
        self._nodes.pop(name, None)
        self._stopping.pop(name, None)

    def lost(self, node: str) -> None:
        """Forget the stops of a node that has lost its agent, whose guard clears up."""
        for name in [name for name, its_node in self._nodes.items() if its_node == node]:
            self.done(name)


Routing = Literal["starting", "ready", "draining", "dead"]
Trouble = Died | Late | Health | Gone
"""An event that the launcher decides about: a death, a lateness, a silence or its end, a lost node."""

SILENT = "does not answer"
"""Reason for holding a process that lives but is stopped or does not answer its probe."""
NO_SOCKETS = "out of sockets"
"""Reason for holding an engine that cannot open another connection: requests that it is sent fail."""
OTHER_GENERATION = "of another generation"
"""Reason for holding engines that cannot exchange KV with those that get requests."""
_OVER = ("pending", "stopped", "dead")
_FEW_PROCESSES = 32
_ASK_SECONDS = 3.0
_IDLE_LOOK_SECONDS = 0.2
_SAVE_SECONDS = 0.1
"""How late the recorded state of a large deployment may be; its history is never late."""


class Fleet:
    """All processes of one deployment. Runs in one event loop; no method blocks."""

    def __init__(
        self,
        plan: Plan,
        run: RunDir,
        state: DeploymentState,
        *,
        secrets: Mapping[str, str],
        on_event: Callable[[dict[str, Any]], None],
        end: Callable[[], None],
    ) -> None:
        """`secrets`: name -> value; `on_event` gets every event of the history as it is written; `end` is called when
        an agent is ended from outside, which is the end of the deployment and no failure."""
        self.plan = plan
        self.state = state
        self.run = run
        self.links: dict[str, AgentLink] = {}
        self.troubles: asyncio.Queue[Trouble] = asyncio.Queue()
        self.held: dict[str, set[str]] = {}
        """Process -> reasons for which it gets no traffic although it lives; it returns when the last one is gone."""
        self._silent_since: dict[str, float] = {}
        """Process that does not answer -> since when (time.monotonic)."""
        self.behind = False
        """The record on disk is older than what is known: writing it failed, and is tried again."""
        self._saving: asyncio.TimerHandle | None = None
        self._pending_stops = PendingStops()
        self._secrets = secrets
        self._on_event = on_event
        self._end = end
        self._routing: dict[str, Routing] = {worker.name: "starting" for worker in plan.proxy.workers}
        self._changed = asyncio.Event()
        self.changes = 0
        """How often the state has changed so far."""
        self.adopt(plan)

    def adopt(self, plan: Plan) -> None:
        """Takes over a plan: new processes are pending, processes that it no longer has are forgotten. The proxy learns
        of workers that come, and drains those that go; it need not be started again for them."""
        before = {worker.name: worker for worker in self.plan.proxy.workers}
        self.plan = plan
        known = self.state.processes
        self.state.processes = {
            process.name: known.get(process.name) or ProcessState(role=process.role, node=process.node)
            for process in plan.processes
        }
        for process in plan.processes:
            self.state.processes[process.name].node = process.node  # it may have moved
        self._routing = {
            worker.name: self._routing.get(worker.name, "starting")
            if worker == before.get(worker.name, worker)
            else "starting"
            for worker in plan.proxy.workers
        }
        self._push_workers()

    # Acting --------------------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Orders a start; Ready, Died or Late will follow. On a node that was lost it stays dead. Never beside an
        earlier life, which would keep its port and devices, and whose end would be taken for that of the new one."""
        process = self.plan.process(name)
        state = self.state.processes[name]
        if (link := self.links.get(process.node)) is None:
            self._note_failure(name, f"its node {process.node} is lost")
            return
        if self.has_pending_stop(name):
            how = "was not started: its last life was not stopped"
            self.receive(Died(name=name, pid=0, code=None, how=how, seconds=0.0, while_starting=True))
            return
        self._pending_stops.started(name, process.node)
        state.phase, state.note, state.id = "starting", "", None
        self.held.get(name, set()).difference_update((SILENT, NO_SOCKETS))
        state.started_at, state.ready_at, state.start_seconds = time.time(), None, None
        values = {variable: self._secrets[secret] for variable, secret in process.env.secrets.items()}
        self.record("start", name=name, node=process.node)
        forget(self.run, name)
        share = cpu_share(self.plan, name)
        link.send(Start(process=process, token=self.state.token, secrets=values, cpu_share=share))

    async def stop(self, name: str, grace: float | None = None) -> None:
        """Stops one process tree and returns when it is gone (or its agent is). A stop that was ordered elsewhere
        is waited for; only a shorter grace is an order of its own."""
        process = self.plan.process(name)
        state = self.state.processes[name]
        over = state.phase in ("pending", "done", "stopped") and not self.has_pending_stop(name)
        if over or process.node not in self.links:
            state.phase = "dead" if state.phase == "dead" else "stopped"
            return
        grace = process.stop_seconds if grace is None else grace
        # Clearing away what is left of a dead process does not make it one that was stopped on purpose.
        then: ProcessPhase = "dead" if state.phase == "dead" else "stopped"
        state.phase = "draining" if state.phase != "dead" else "dead"
        if self._pending_stops.order_stop(name, process.node, grace, then):
            self.record("stop", name=name, node=process.node)
            self.links[process.node].send(Stop(name=name, grace=grace))
        with contextlib.suppress(TimeoutError):
            # Not wait_for, which Python 3.11 lets go on when it is cancelled at the moment at which it ends.
            async with time_limit(grace + ANSWER_SECONDS):
                await self.until(lambda: not self._pending_stops.is_stopping(name) or process.node not in self.links)

    def has_pending_stop(self, name: str) -> bool:
        """True while something of its last life may be left: it is to be stopped before it is started again."""
        return name in self._pending_stops

    async def proven_while(self, holds: Callable[[], bool], proof: Coroutine[Any, Any, bool]) -> bool:
        """A proof; False as soon as what it needs is no longer there, whatever time the proof itself would take."""
        proven = asyncio.ensure_future(proof)
        over = asyncio.ensure_future(self.until(lambda: not holds()))
        try:
            await asyncio.wait({proven, over}, return_when=asyncio.FIRST_COMPLETED)
            return proven.done() and proven.result()
        finally:
            proven.cancel()
            over.cancel()
            await asyncio.gather(proven, over, return_exceptions=True)

    def is_dead_with_pending_stop(self, name: str) -> bool:
        """True for one that has died, and of which what is left was not stopped."""
        return name in self.plan.names() and self.phase_of(name) == "dead" and self.has_pending_stop(name)

    async def stop_in_order(self, processes: Iterable[Process]) -> None:
        """Stops stage after stage; the processes of one stage together."""
        ordered = sorted(processes, key=lambda process: process.stop_stage)
        for _, stage in groupby(ordered, key=lambda process: process.stop_stage):
            await asyncio.gather(*(self.stop(process.name) for process in stage))

    def hurry(self) -> None:
        """Ends the grace of all that is stopping now."""
        for name, state in self.state.processes.items():
            if state.phase == "draining":
                task = asyncio.ensure_future(self.stop(name, grace=0.0))
                task.add_done_callback(lambda done: done.cancelled() or done.exception())

    def route(self, worker: str, routing: Routing) -> None:
        """Tells the proxy, at once, what it may send to a worker."""
        if worker not in self._routing or self._routing[worker] == routing:
            return
        self._routing[worker] = routing
        self.record("route", name=worker, routing=routing)
        self._push(worker)

    def _push(self, worker: str) -> None:
        for process in self.plan.processes:
            if process.control == "stdin":
                self.push(process.name, worker, {"worker": worker, "state": self._routing[worker]})

    def _push_workers(self) -> None:
        """Tells the proxy all of its workers, and what it may send to each."""
        workers = [worker.model_dump(mode="json") for worker in self.plan.proxy.workers]
        for process in self.plan.processes:
            if process.control == "stdin":
                self.push(process.name, "workers", {"workers": workers, "states": self._routing})

    def push(self, name: str, about: str, message: Mapping[str, Any]) -> None:
        """Writes a line to a process that has `control: stdin`. `about`: its subject (protocol.Push)."""
        if (link := self.links.get(self.plan.process(name).node)) is not None:
            link.send(Push(name=name, about=about, line=json.dumps(message)))

    def on_node_of(self, name: str) -> AskNode:
        """A way to make HTTP requests from the node of a process. Where its agent is gone, the answer is an error."""
        link = self.links.get(self.plan.process(name).node)
        return _unreachable if link is None else link.ask

    # Seeing --------------------------------------------------------------------------------------------------------

    async def until(self, holds: Callable[[], bool]) -> None:
        """Returns once a condition on the state holds."""
        while not holds():
            await self._changed.wait()

    def wake(self) -> None:
        """Has conditions looked at again that hang on more than the recorded state."""
        self.changes += 1
        woken, self._changed = self._changed, asyncio.Event()
        woken.set()

    async def changed_since(self, changes: int) -> None:
        """Returns once the state has changed after there were so many `changes`, also if that was before this task
        took its first step."""
        await self.until(lambda: self.changes != changes)

    async def outcome(self, name: str) -> bool:
        """Wait after `start`: True when it became ready (degraded, if it is held), False when it died or was late."""
        state = self.state.processes[name]
        await self.until(lambda: state.phase not in ("pending", "starting"))
        return state.phase in ("ready", "degraded", "done")

    def phase_of(self, name: str) -> str:
        """Short for the recorded phase of one process."""
        return self.state.processes[name].phase

    def receive(self, event: Event) -> None:
        """One event of an agent: state, history, proxy, and on to `troubles` if the launcher must decide."""
        match event:
            case Hello():
                self.state.nodes[event.node] = NodeState(**event.model_dump(exclude={"event", "node"}))
                self.record("agent", node=event.node, pid=event.agent.pid)
            case SignalReceived():
                self.record("signal_received", node=event.node, signal=event.signal)
                self._end()
            case Gone():
                self._note_lost_node(event)
            case _ if event.name not in self.state.processes:
                if isinstance(event, Stopped):
                    self._pending_stops.stopped(event.name, left=bool(event.left))
                return
            case Started():
                self.state.processes[event.name].id = event.id
                self.record("started", name=event.name, node=self.state.processes[event.name].node, pid=event.id.pid)
                if self.plan.process(event.name).control == "stdin":
                    self._push_workers()
            case Progress():
                # The log of a dead process is read to its end, and the reason of its death must stay.
                if self.state.processes[event.name].phase != "dead":
                    self.state.processes[event.name].note = event.text
                self.record("progress", name=event.name, text=event.text)
            case LogCut():
                self.record("log_cut", **event.model_dump(exclude={"event"}))
            case Ready():
                self._became_ready(event)
            case Died():
                self._note_failure(event.name, event.how if event.member is None else f"{event.member} {event.how}")
                why = history_fields(event.log_tail, exit_code=event.code, role=self.plan.process(event.name).role)
                self.record("died", **event.model_dump(exclude={"event", "log_tail"}), **why)
            case Late():
                self._note_failure(event.name, f"not ready after {event.seconds:.0f} s: {event.last_answer}")
                why = history_fields(event.log_tail, exit_code=None, role=self.plan.process(event.name).role)
                self.record("late", **event.model_dump(exclude={"event", "log_tail"}), **why)
            case Health():
                self._changed_health(event)
            case Sockets():
                self._changed_sockets(event)
            case Swapped():
                self._note_swap(event)
            case Stopped():
                self._note_stop(event)
                left = {"left": event.left} if event.left else {}
                self.record("stopped", name=event.name, forced=event.forced, seconds=round(event.seconds, 3), **left)
            case _:
                assert_never(event)
        if isinstance(event, Died | Late | Health | Gone):
            self.troubles.put_nowait(event)

    def _became_ready(self, event: Ready) -> None:
        state = self.state.processes[event.name]
        if state.phase != "starting":
            return
        reasons = self.held.get(event.name)
        state.phase, state.note = ("degraded", _to_be(reasons)) if reasons else ("ready", "")
        if done := isinstance(self.plan.process(event.name).probe, ExitProbe):
            state.phase, state.died_at = "done", time.time()
            self._pending_stops.done(event.name)
        state.ready_at, state.start_seconds, state.open_ports = time.time(), round(event.seconds, 3), event.ports
        self.record("ready", name=event.name, seconds=round(event.seconds, 3), **({"done": True} if done else {}))
        if not reasons:
            self.route(event.name, "ready")

    def hold(self, name: str, reason: str) -> None:
        """Takes a process out of routing for a reason; requests that run there go on."""
        self.held.setdefault(name, set()).add(reason)
        state = self.state.processes[name]
        if state.phase in ("ready", "degraded"):
            state.phase, state.note = "degraded", _to_be(self.held[name])
            self.route(name, "draining")

    def release(self, name: str, reason: str) -> None:
        """Takes a reason back. With the last one a process that lives returns to routing; a dead one stays dead."""
        reasons = self.held.get(name, set())
        reasons.discard(reason)
        state = self.state.processes[name]
        if state.phase != "degraded":
            return
        state.note = _to_be(reasons)
        if not reasons:
            state.phase = "ready"
            self.route(name, "ready")

    def _note_failure(self, name: str, note: str) -> None:
        state = self.state.processes[name]
        state.phase, state.note, state.died_at = "dead", note, time.time()
        self.route(name, "dead")

    def _note_stop(self, event: Stopped) -> None:
        state = self.state.processes[event.name]
        state.phase = self._pending_stops.stopped(event.name, left=bool(event.left))
        if state.phase == "stopped":
            state.died_at = time.time()

    def release_all(self) -> None:
        """Every reason but silence is taken back: the deployment as a whole was proven."""
        for name, reasons in self.held.items():
            for reason in reasons - {SILENT, NO_SOCKETS}:
                if name in self.state.processes:
                    self.release(name, reason)

    def silent(self, name: str) -> bool:
        """True while a process lives but does not answer."""
        return SILENT in self.held.get(name, ())

    def silent_seconds(self, name: str) -> float:
        """Return for how many seconds a silent process has been so."""
        return time.monotonic() - self._silent_since[name]

    def give_up(self, name: str, why: str) -> Died:
        """A process that was silent for too long counts as dead from here on, although it lives."""
        seconds, state = self.plan.timeouts.unresponsive_seconds, self.state.processes[name]
        died = declared_death(name, f"did not answer for {seconds:.0f} s ({why})", seconds)
        state.phase, state.note = "dead", died.how
        self.route(name, "dead")
        self.record("given_up", name=name, why=died.how)
        return died

    def _changed_health(self, event: Health) -> None:
        if event.responsive:
            self.release(event.name, SILENT)
        else:
            self._silent_since[event.name] = time.monotonic()
            self.hold(event.name, SILENT)
            self.state.processes[event.name].note = event.why
        self.record("responsive" if event.responsive else "unresponsive", name=event.name, why=event.why)

    def _changed_sockets(self, event: Sockets) -> None:
        if event.short:
            self.hold(event.name, NO_SOCKETS)
            todo = "raise `ulimit -n` where pdserve is started (for good: /etc/security/limits.conf), then start again"
            self.record("out_of_sockets", name=event.name, times=event.times, todo=todo)
        else:
            self.release(event.name, NO_SOCKETS)
            self.record("sockets_again", name=event.name, times=event.times)

    def _note_swap(self, event: Swapped) -> None:
        node = self.state.processes[event.name].node
        self.record("swapped", name=event.name, node=node, bytes=event.bytes, read_back=event.read_back)

    def _note_lost_node(self, event: Gone) -> None:
        self.links.pop(event.node, None)
        self._pending_stops.lost(event.node)
        # What was dead before keeps the reason of its own death.
        lost = [n for n, s in self.state.processes.items() if s.node == event.node and s.phase not in _OVER]
        for name in lost:
            self._note_failure(name, f"the agent of {event.node} is gone: {event.how}")
        expected = self.state.phase == "draining" and not lost
        if (node := self.state.nodes.get(event.node)) is not None and not expected:
            node.lost = event.how
        self.record("agent_left" if expected else "agent_gone", node=event.node, how=event.how)

    def record(self, kind: str, **fields: Any) -> None:
        """Writes the history and the state, calls `on_event`, wakes the waiters. Never fails: a full disk, a deleted
        run directory or a closed terminal must not end supervision."""
        event: dict[str, Any] = {"at": round(time.time(), 3), "event": kind, **fields}
        try:
            event = self.run.append_event(kind, **fields)
        except OSError:
            self.behind = True
        self._save_soon()
        try:
            self._on_event(event)
        except (OSError, SystemExit):  # rich leaves the process when its pipe is closed
            self._on_event = _no_listener
        self.wake()

    def _save_soon(self) -> None:
        """Write the state, at once for few processes. That of hundreds is not written for each of the thousands of
        events of a start, which would take the launcher's time for everything else."""
        if len(self.state.processes) <= _FEW_PROCESSES:
            self.save()
        elif self._saving is None:
            self._saving = asyncio.get_running_loop().call_later(_SAVE_SECONDS, self.save)

    def save(self) -> None:
        """Writes the state; what cannot be written now is tried again."""
        if self._saving is not None:
            self._saving.cancel()
            self._saving = None
        try:
            self.run.write(self.run.state, self.state.model_dump_json(indent=1))
        except OSError:
            self.behind = True
        else:
            self.behind = False


def declared_death(name: str, how: str, seconds: float) -> Died:
    """A death that we decided on, not one that the kernel reported."""
    return Died(name=name, pid=0, code=None, how=how, seconds=seconds, while_starting=False)


def _to_be(reasons: Collection[str] | None) -> str:
    return ", ".join(sorted(reasons or ()))


async def _unreachable(
    method: Method,
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    body: str | None = None,
    seconds: float,
) -> Answered:
    return Answered(id=0, status=None, error="the agent of its node is gone")


def _no_listener(event: dict[str, Any]) -> None:
    """The listener has gone; the history is still on disk."""


class InstanceRouting:
    """Does to all ranks of an instance what the fleet does to one worker: they serve together or not at all.

    With hybrid or external load balancing an instance has several workers of the proxy, and over several nodes it has
    processes that serve nothing by themselves."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def servers(self, name: str) -> list[str]:
        """Return the API servers of a process's instance. For what is no part of an instance, return the process
        itself."""
        return [process.name for process in self._fleet.plan.instance_of(name) if process.probe is not None]

    def route(self, name: str, routing: Routing) -> None:
        """Tell the proxy what it may send to the servers of an instance."""
        for server in self.servers(name):
            self._fleet.route(server, routing)

    def hold(self, name: str, reason: str) -> None:
        """Take the servers of an instance out of routing for a reason."""
        for server in self.servers(name):
            self._fleet.hold(server, reason)

    def release(self, name: str, reason: str) -> None:
        """Take back a reason to hold the servers of an instance."""
        for server in self.servers(name):
            self._fleet.release(server, reason)

    async def drained(self, name: str, *, key: str) -> None:
        """Waits until the proxy has no request running there, for as long as the recipe lets requests finish. `key`: of
        the engines."""
        workers = {worker.name for worker in self._fleet.plan.proxy.workers}
        await asyncio.gather(*(self._idle(server, key) for server in self.servers(name) if server in workers))

    async def _idle(self, worker: str, key: str) -> None:
        plan, ask = self._fleet.plan, self._fleet.on_node_of("proxy")
        with contextlib.suppress(TimeoutError):
            async with time_limit(plan.proxy.drain_seconds):
                await _until_idle(ask, plan.proxy_url, worker, key=key)

    def serves(self, name: str) -> bool:
        """Tell whether one process was ready, and lives; held or silent it may be."""
        return self._fleet.phase_of(name) in ("ready", "degraded")

    async def all_ready(self, name: str) -> bool:
        """Wait until each of its processes is ready, dead or late; True if all became ready."""
        processes = self._fleet.plan.instance_of(name)
        return all(await asyncio.gather(*(self._fleet.outcome(process.name) for process in processes)))

    def lives(self, name: str) -> Callable[[], bool]:
        """Return a condition: no process of an instance is dead."""
        processes = [process.name for process in self._fleet.plan.instance_of(name)]
        return lambda: all(self._fleet.phase_of(process) != "dead" for process in processes)

    def first_dead(self, name: str) -> str | None:
        """Return the first process of an instance that is dead."""
        dead = (p.name for p in self._fleet.plan.instance_of(name) if self._fleet.phase_of(p.name) == "dead")
        return next(dead, None)


async def _until_idle(ask: AskNode, proxy_url: str, worker: str, *, key: str) -> None:
    """Wait until the proxy has no request in flight on a worker that it was told to drain, or cannot be asked. Requests
    in processes that a rolling restart has replaced are waited for too, though the proxy does not count them for the
    worker. The caller sets the limit of time."""
    while True:
        answer = await ask("GET", f"{proxy_url}/workers", headers=bearer(key), seconds=_ASK_SECONDS)
        try:
            page = json_object(answer)
            entries = [entry for entry in page["workers"] if entry["name"] == worker]
            busy = any(entry["in_flight"] or entry["state"] == "ready" for entry in entries)
        except (KeyError, TypeError):
            return
        if not busy and not page.get("retiring"):
            return
        await asyncio.sleep(_IDLE_LOOK_SECONDS)


def bearer(key: str) -> dict[str, str]:
    """Return the header that has a key."""
    return {"Authorization": f"Bearer {key}"}


def json_object(answer: Answered) -> dict[str, Any]:
    """Return the JSON object of an answer; an empty one if it has none."""
    try:
        parsed = json.loads(answer.body)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
