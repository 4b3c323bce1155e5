"""Runs a Plan over agents: start in stages, prove readiness, serve, tear down in order.

The launcher never touches a process itself: agents do. It is the one writer of the run's state and history. Whatever
way it ends, what it started is stopped; if it is killed, its agents see the pipe close and stop everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, TypeVar, assert_never

from pdserve.errors import PdserveError, ServeError, StartError, StateError
from pdserve.launch.failure import failure_markdown, not_reached, start_error
from pdserve.launch.fleet import Fleet, Trouble
from pdserve.launch.launch_record import KeptRecord, record_versions, save_change
from pdserve.launch.recovery import Recovery
from pdserve.launch.rolling_change import RollingChange, roll
from pdserve.launch.start_proofs import StartProofs
from pdserve.logs.rotation import keep_bounded
from pdserve.plan.environment import ENGINE_KEY
from pdserve.plan.model import Plan
from pdserve.plan.node import Node, has_lease
from pdserve.plan.process import Process
from pdserve.reach.link import AgentLink
from pdserve.reach.protocol import Died, Event, Gone, Health, Late, Shutdown
from pdserve.run import inbox
from pdserve.run.change import LIVING, Change, change, plan_between
from pdserve.run.containers import clear_containers
from pdserve.run.directory import BEAT_SECONDS, RunDir
from pdserve.run.inbox import Apply, Down, Fetch, Reply, Request, Restart
from pdserve.run.orphans import may_be_busy, resume_stopped_supervisors, stop_left
from pdserve.run.state import DeploymentState, Phase, ProcessState
from pdserve.system.stop_signals import hear_stops
from pdserve.time_limit import time_limit

ResultT = TypeVar("ResultT")
Record = Callable[..., None]
"""Writes an event to the history: (kind, **fields)."""
WhileReady = Callable[[Record], Coroutine[Any, Any, None]]
"""Begins once the deployment is ready. Its return takes the deployment down; it is cancelled when that ends first, and
a second time when it is to hurry."""
OpenAgent = Callable[[Node, Callable[[Event], None]], AgentLink]
"""(node, receiver of events) -> link; how is the transport's business."""

_HELLO_SECONDS = 20.0
_FAR_HELLO_SECONDS = 120.0
"""A scheduler, a login or a container comes before the agent."""
_LEAVE_SECONDS = 60.0
_ANSWER_SECONDS = 2.0
"""How long requests that a stop interrupts have for their answer."""


class StopRequested(Exception):  # noqa: N818  (a signal or `down` asked for it)
    """The deployment is to stop."""


class Launcher:
    """One deployment, from start to teardown. `run` is called once."""

    def __init__(
        self,
        plan: Plan,
        run: RunDir,
        state: DeploymentState,
        *,
        secrets: Mapping[str, str],
        open_agent: OpenAgent,
        on_event: Callable[[dict[str, Any]], None],
        keep_on_failure: bool = False,
        began: float,
        while_ready: WhileReady | None = None,
    ) -> None:
        """Prepare the launch, and start nothing yet. `began`: time.monotonic() at which the user's command began, for
        the orchestration's own share."""
        self._stop_asked = asyncio.Event()
        self._fleet = Fleet(plan, run, state, secrets=secrets, on_event=on_event, end=self._stop_asked.set)
        self._run_dir = run
        self._record = KeptRecord(self._fleet, engine_key=secrets[ENGINE_KEY])
        self._state = state
        self._open_agent = open_agent
        self._keep = keep_on_failure
        self._secrets = secrets
        self._began = began
        self._fatal: asyncio.Queue[PdserveError] = asyncio.Queue()
        self._proofs = StartProofs(self._fleet, engine_key=secrets[ENGINE_KEY])
        self._recovery = Recovery(self._fleet, engine_key=secrets[ENGINE_KEY], fail=self._fatal.put_nowait)
        self._links: list[AgentLink] = []
        self._down_requests: list[str] = []
        self._notes: list[str] = []
        self._requests: asyncio.Queue[tuple[str, Apply | Restart]] = asyncio.Queue()
        self._one_change = asyncio.Lock()
        """Changes and restarts wait for each other: each is judged by what the one before has left."""
        self._errands: set[asyncio.Task[None]] = set()
        self._client = ClientTask(while_ready, record=self._fleet.record, ended=self._stop_asked.set)

    async def run(self) -> bool:
        """Run the deployment until a stop is asked for, and return whether it had been ready before. Raises StartError
        or ServeError after everything is torn down."""
        hear_stops(self._asked_to_stop)
        background = [
            asyncio.create_task(self._take_requests()),
            asyncio.create_task(keep_bounded(self._run_dir.logs, lambda: self._fleet.plan.logs)),
        ]
        error: PdserveError | None = None
        try:
            failure = await self._bring_up(self._fleet.plan.processes, keep=self._keep)
            if failure is not None and not self._keep:
                raise failure
            self._client.begin()
            await self._serve()
        except StopRequested:
            pass
        except PdserveError as failure:
            error = failure
            self._fleet.record("failed", error=failure.render(), exit_code=failure.exit_code)
            self._leave_report(failure)
        finally:
            await self._client.end()  # before the proxy drains, which would wait for its requests
            await self._recovery.close(error)
            if self._errands:  # who waits for a verb is told what ended it
                await asyncio.wait(self._errands, timeout=_ANSWER_SECONDS)
            for errand in self._errands:
                errand.cancel()
            await self._tear_down("stopped" if error is None else "failed", error)
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            self._run_dir.remove_beat()
        if error is not None:
            raise error
        self._client.check()
        return self._state.ready_at is not None

    def _leave_report(self, error: PdserveError) -> None:
        """Write failure.md before the teardown, which changes what the processes are. A full disk must not hide the
        error itself."""
        with contextlib.suppress(OSError):
            events, _ = self._run_dir.read_events()
            self._run_dir.write(self._run_dir.failure, failure_markdown(error, self._state.name, self._state, events))

    def _asked_to_stop(self, by: signal.Signals | None = None) -> None:
        """Handle a request to stop: a signal, or `down` (`by` None). A second TERM hurries nothing: scancel sends one,
        its script another."""
        if self._stop_asked.is_set() and by is signal.SIGINT:
            self._client.hurry()
            self._fleet.hurry()
        self._stop_asked.set()

    # Start ---------------------------------------------------------------------------------------------------------

    async def _bring_up(self, processes: tuple[Process, ...], *, keep: bool) -> StartError | None:
        """Starts `processes` stage by stage and proves the whole plan; a failure is returned. With `keep` what is
        healthy or still loading goes on, and the deployment waits for another `up`, `restart` or `down`."""
        race = StartRace(self._fleet, {process.name for process in processes}, self._stop_asked)
        try:
            self._set_phase("starting")
            await race.run(self._open_agents(self._fleet.plan))
            planned = sorted(self._fleet.plan.processes, key=lambda process: process.start_stage)
            for _, group in groupby(planned, key=lambda process: process.start_stage):
                names = [process.name for process in group]
                starting = [name for name in names if any(process.name == name for process in processes)]
                await race.run(self._stop_first(starting))
                for name in starting:
                    self._fleet.start(name)
                await race.run(self._fleet.until(lambda names=names: all(map(self._is_up, names))))  # type: ignore[misc]
                if any(self._fleet.plan.process(name).fetches_weights for name in names):
                    await race.run(self._proofs.same_weights())
            self._proofs.patches_active(process.name for process in processes)
            await race.run(self._proofs.attached())
            await race.run(self._proofs.reached())
            self._fleet.release_all()
            canary = await race.run(self._proofs.canary())
            self._set_phase("ready")
            self._account(processes, canary)
        except StartError as failure:
            if not keep:
                return failure
            self._fleet.record("failed", error=failure.render(), exit_code=failure.exit_code, kept=True)
            await self._fleet.stop_in_order(race.dead_of_starting())
            self._state.note = failure.what
            self._set_phase("failed")
            self._recovery.take_over(race.serving_troubles)
            return failure
        self._recovery.take_over(())
        return None

    async def _stop_first(self, names: Iterable[str]) -> None:
        """Stop what still runs and is to start anew: vllm-router, beside prefills that were started."""
        await asyncio.gather(*(self._fleet.stop(name) for name in names if self._fleet.phase_of(name) in LIVING))

    def _is_up(self, name: str) -> bool:
        """Tell whether a process is healthy; an engine that is only held for its cache server counts, because that is
        proven next."""
        return self._is_ready(name) or (self._fleet.phase_of(name) == "degraded" and not self._fleet.silent(name))

    def _is_ready(self, name: str) -> bool:
        return self._fleet.phase_of(name) in ("ready", "done")

    async def _open_agents(self, plan: Plan) -> None:
        """Start an agent on each node of a plan that has none, and return once all answer. Raises StartError for one
        that does not."""
        for node in plan.nodes:
            if node.name not in self._fleet.links:
                self._state.nodes.pop(node.name, None)  # of a node that was lost, and may be back
                link = self._open_agent(node, self._fleet.receive)
                self._fleet.links[node.name] = link
                self._links.append(link)
        seconds = _FAR_HELLO_SECONDS if any(map(has_lease, plan.nodes)) else _HELLO_SECONDS
        try:
            async with time_limit(seconds):
                await self._fleet.until(lambda: all(node.name in self._state.nodes for node in plan.nodes))
        except TimeoutError:
            silent = [node.name for node in plan.nodes if node.name not in self._state.nodes]
            raise StartError(
                f"no agent answered on {', '.join(silent)} within {seconds:.0f} s",
                where=f"agent@{silent[0]}",
                todo=f"read {self._run_dir.logs / f'agent@{silent[0]}.log'}",
            ) from None

    def _account(self, processes: tuple[Process, ...], canary: float) -> None:
        seconds = start_seconds_by_part(
            processes, self._state.processes, total=time.monotonic() - self._began, canary=canary
        )
        self._state.ready_at = time.time()
        self._fleet.record("up", endpoint=self._state.endpoint, **seconds)

    # Serve ---------------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Serve until a stop is asked for, or the deployment cannot serve on (raises ServeError)."""
        judged = -1  # changes that the last judgement saw
        while True:
            change = asyncio.ensure_future(self._fleet.changed_since(judged))
            trouble = asyncio.ensure_future(self._fleet.troubles.get())
            fatal = asyncio.ensure_future(self._fatal.get())
            stop = asyncio.ensure_future(self._stop_asked.wait())
            request = asyncio.ensure_future(self._requests.get())
            racing: set[asyncio.Future[Any]] = {trouble, fatal, stop, change, request}
            try:
                await asyncio.wait(racing, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in racing:
                    task.cancel()  # no effect on those that are done
            if trouble.done():
                self._recovery.react(trouble.result())
            while not self._fleet.troubles.empty():
                self._recovery.react(self._fleet.troubles.get_nowait())
            if fatal.done():
                failure = fatal.result()
                if not self._keep:
                    raise failure
                self._fleet.record("failed", error=failure.render(), exit_code=failure.exit_code, kept=True)
                self._state.note = failure.what
                self._set_phase("failed")
            if stop.done():
                raise StopRequested
            if request.done():
                await self._fulfil(*request.result())
            if self._fatal.empty():  # else it ends, and "degraded" would promise that it goes on
                self._judge()
            judged = self._fleet.changes

    def _judge(self) -> None:
        """Set the phase to ready or degraded, from what the processes are. A failed deployment is judged anew only by
        `up`."""
        if self._state.phase not in ("ready", "degraded"):
            return
        self._set_phase("ready" if all(map(self._is_ready, self._state.processes)) else "degraded")

    def _set_phase(self, phase: Phase) -> None:
        if self._state.phase != phase:
            self._state.phase = phase
            self._fleet.record("phase", phase=phase)

    # Requests ------------------------------------------------------------------------------------------------------

    async def _take_requests(self) -> None:
        last_beat = 0.0
        loop = UnendingLoop()
        while True:
            await loop.step(self._record.look)
            if self._fleet.behind:
                self._fleet.save()
            if time.monotonic() - last_beat >= BEAT_SECONDS:
                last_beat = time.monotonic()
                self._run_dir.write_beat()
            # A full disk or a deleted run directory: the next look may succeed.
            with contextlib.suppress(OSError):
                for name, request in inbox.take(self._run_dir):
                    await loop.step(partial(self._take, name, request))
            await asyncio.sleep(inbox.POLL_SECONDS)

    def _take(self, name: str, request: Request) -> None:
        if isinstance(request, Down):
            self._down_requests.append(name)
            self._asked_to_stop()
        elif isinstance(request, Fetch):
            self._errand(name, self._fetch(request))
        elif not isinstance(request, Apply | Restart):
            assert_never(request)
        elif self._state.phase in ("starting", "draining"):
            busy = StateError(f"the deployment is {self._state.phase}", todo="wait, or pdserve down")
            inbox.answer(self._run_dir, name, Reply(exit_code=busy.exit_code, message=busy.render()))
        else:
            self._requests.put_nowait((name, request))

    async def _fulfil(self, name: str, request: Apply | Restart) -> None:
        """Fulfil a request beside serving. Only `up` on a deployment that has failed is a start again, and owns the
        events meanwhile."""
        if isinstance(request, Restart):
            self._errand(name, self._in_turn(self._restart(request.name)))
        elif self._state.phase == "failed":
            await self._reply(name, self._start_again(request))
        else:
            self._errand(name, self._in_turn(self._change(request)))

    async def _in_turn(self, work: Coroutine[Any, Any, Reply]) -> Reply:
        try:
            async with self._one_change:
                return await work
        finally:
            work.close()  # one that never had its turn

    def _errand(self, name: str, work: Coroutine[Any, Any, Reply]) -> None:
        """Answers a request beside serving."""
        errand = asyncio.create_task(self._reply(name, work))
        self._errands.add(errand)
        errand.add_done_callback(partial(self._errand_ended, name))

    def _errand_ended(self, name: str, errand: asyncio.Task[None]) -> None:
        """Answer also after a bug: who asked must not wait for an answer that it has eaten."""
        self._errands.discard(errand)
        if not errand.cancelled() and (bug := errand.exception()) is not None:
            traceback.print_exception(bug, file=sys.stderr)
            with contextlib.suppress(OSError):
                inbox.answer(self._run_dir, name, Reply(exit_code=1, message=f"a defect of pdserve: {bug!r}"))

    async def _fetch(self, request: Fetch) -> Reply:
        if (link := self._fleet.links.get(request.node)) is None:
            raise StateError(f"the agent of {request.node} is gone")
        answer = await link.ask(request.method, request.url, body=request.body, seconds=request.seconds)
        return Reply(exit_code=0, message=answer.model_dump_json())

    async def _reply(self, name: str, work: Coroutine[Any, Any, Reply]) -> None:
        try:
            reply = await work
        except PdserveError as error:
            reply = Reply(exit_code=error.exit_code, message=error.render())
        with contextlib.suppress(OSError):
            inbox.answer(self._run_dir, name, reply)

    async def _restart(self, name: str) -> Reply:
        if name not in self._state.processes:
            raise StateError(f"no process called {name!r}", todo=f"one of: {', '.join(self._state.processes)}")
        if self._fleet.plan.process(name).ends_when_done:
            raise StateError(f"{name} has nothing to do while engines run", todo="pdserve down, then pdserve up")
        if name == "proxy" and await roll(self._fleet):
            return Reply(exit_code=0, message=f"{name} is ready")
        if await self._recovery.restart(name):
            if self._state.phase == "failed" and all(map(self._is_ready, self._state.processes)):
                await self._proofs.canary()
                self._state.note = ""
                self._set_phase("ready")
            return Reply(exit_code=0, message=f"{name} is ready")
        raise StartError(f"{name} did not come back: {self._state.processes[name].note}", todo=f"pdserve logs {name}")

    def _check(self, request: Apply) -> Change:
        """Return what has to be done for another plan. Raises StateError for what cannot be done to a running
        deployment."""
        unknown = {name for p in request.plan.processes for name in p.env.secrets.values()} - set(self._secrets)
        if unknown:
            raise StateError(
                f"the recipe names secrets that the running launcher was not given: {', '.join(sorted(unknown))}",
                cause="secrets are taken from the environment of the pdserve up that started the deployment",
                todo="pdserve down, then pdserve up with them exported",
            )
        old = self._fleet.plan.names()
        changes = change(self._fleet.plan, request.plan, {name for name in old if self._fleet.phase_of(name) in LIVING})
        costly = [name for name in changes.replaced if not request.plan.process(name).is_proxy]
        if costly and not request.replace:
            raise StateError(
                f"{', '.join(costly)} run(s) with another command, environment or setup than this recipe gives",
                todo="pdserve up --replace restarts them with the new one, one after the other; pdserve down stops "
                "everything",
            )
        return changes

    async def _change(self, request: Apply) -> Reply:
        """Change from the plan that runs to another one, while it serves."""
        changes = self._check(request)

        def save(plan: Plan, recipe: str | None = None) -> None:
            save_change(self._run_dir, plan, recipe)
            self._record.keep()

        same = self._run_dir.read_versions() == request.versions
        rolling = RollingChange(
            self._fleet, self._recovery, request.plan, changes, same_versions=same or not changes.replaced, save=save
        )
        if not changes.starting and not changes.gone:
            save(request.plan, request.recipe)
            self._fleet.adopt(request.plan)
            if all(map(self._is_ready, self._fleet.plan.names())):
                self._state.change = ""
                return Reply(exit_code=0, message=f"already up{changes.stays}")
        save(plan_between(self._fleet.plan, request.plan, ()))  # without room for it nothing changes
        self._state.change = "under way"
        try:
            await self._open_agents(request.plan)
            await rolling.run()
            save(request.plan, request.recipe)
            await self._proofs.canary()
        except PdserveError as failure:
            left = ", ".join(rolling.left())
            self._state.change = f"stopped ({failure.what}); as before: {left or 'nothing'}"
            self._fleet.record("change", step="stopped", why=failure.what, left=rolling.left())
            raise
        self._state.change = ""
        if changes.replaced:
            with contextlib.suppress(OSError):
                record_versions(self._run_dir, request.versions)
        self._fleet.record("change", step="done", text=rolling.summary())
        lacking = [name for name in self._fleet.plan.names() if not self._is_ready(name)]
        now = f"degraded: {', '.join(lacking)} does not serve" if lacking else "ready"
        return Reply(exit_code=0, message=f"{rolling.summary()}; {now}{changes.stays}")

    async def _start_again(self, request: Apply) -> Reply:
        """Start what a failed start, which was kept, has left missing: in the order of the first one."""
        changes = self._check(request)
        old = {process.name: process for process in self._fleet.plan.processes}
        new = {process.name: process for process in request.plan.processes}
        save_change(self._run_dir, request.plan, request.recipe)  # without room for it nothing changes
        await self._recovery.settle()  # not before the refusals: a refused request must leave recoveries alone
        gone = [name for name in changes.gone if self._fleet.phase_of(name) != "stopped"]
        # What a recovery was stopping, or a failed start has left, may still hold its port and devices.
        idle = [name for name in changes.starting if name in old and self._fleet.phase_of(name) not in LIVING]
        left = [name for name in idle if self._fleet.has_pending_stop(name)]
        await self._fleet.stop_in_order([old[name] for name in dict.fromkeys((*gone, *changes.replaced, *left))])
        self._record.keep()
        self._fleet.adopt(request.plan)
        missing = tuple(new[name] for name in changes.starting)
        self._began = time.monotonic()
        names = ", ".join(process.name for process in missing)
        if (failure := await self._bring_up(missing, keep=True)) is not None:
            raise failure
        return Reply(exit_code=0, message=f"started {names or 'nothing'}; ready{changes.stays}")

    # Teardown ------------------------------------------------------------------------------------------------------

    async def _tear_down(self, phase: Phase, error: PdserveError | None) -> None:
        """Stop all: proxy (drain), decode, prefill, LMCache; then the agents. Ends when their guards have left."""
        self._set_phase("draining")
        async with resume_stopped_supervisors(self._state, self._note):
            await self._fleet.stop_in_order(self._fleet.plan.processes)
            for link in self._links:
                link.send(Shutdown())
            left = await asyncio.gather(*(link.close(_LEAVE_SECONDS) for link in self._links))
        await self._clear_containers()  # first: an agent in one of them may still be stopping in order
        if left_by_agents := await stop_left(self._state, self._run_dir):
            self._note(left_by_agents)
        self._run_dir.forget_key()
        self._state.note = error.what if error else ""
        self._state.phase = phase
        self._fleet.record("down", phase=phase, clean=all(left))
        self._fleet.save()
        # Of a silent node nothing is known, and the reason for the end must stay the first.
        late = [link.node for link, gone in zip(self._links, left, strict=True) if not gone and not link.silent]
        busy = [node for node in late if may_be_busy(self._state, self._run_dir, node)]
        self._answer_downs(busy)
        if busy and error is None:
            raise _still_stopping(busy)

    async def _clear_containers(self) -> None:
        cleared = await clear_containers(self._fleet.plan, self._state, self._run_dir, lost_only=True)
        if cleared.memory:
            self._fleet.record("memory_removed", names=list(cleared.memory))
        for line in cleared.lines():
            self._note(line)

    def _note(self, text: str) -> None:
        """Note what is out of order about the stop, for the terminal and for who asked for it."""
        self._notes.append(text)
        self._fleet.record("note", text=text)

    def _answer_downs(self, busy: Sequence[str]) -> None:
        nodes = not_reached(self._state, self._fleet.plan)
        for node, text in nodes.items():
            self._fleet.record("not_reached", node=node, text=text)
        reply = Reply(exit_code=0, message="; ".join(["stopped", *self._notes, *nodes.values()]))
        if busy:
            reply = Reply(exit_code=ServeError.exit_code, message=_still_stopping(busy).render())
        with contextlib.suppress(OSError):
            for name in self._down_requests:
                inbox.answer(self._run_dir, name, reply)


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


class ClientTask:
    """Runs the work once. Without work it does nothing."""

    def __init__(self, work: WhileReady | None, *, record: Record, ended: Callable[[], None]) -> None:
        """Hold the work until `begin`. `ended`: called when the work is over."""
        self._work = work
        self._record = record
        self._ended = ended
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Begin the work: the deployment is ready."""
        if self._work is not None:
            self._task = asyncio.create_task(self._work(self._record))
            self._task.add_done_callback(lambda _: self._ended())

    def hurry(self) -> None:
        """Cancel the work, whose end was asked for twice."""
        if self._task is not None:
            self._task.cancel()

    async def end(self) -> None:
        """End the work, and return once it is over. `check` raises what the work has raised: the teardown comes
        first."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def check(self) -> None:
        """Raise what the work has raised, which is a bug of the work. It is called after `end`."""
        if self._task is not None and not self._task.cancelled() and (error := self._task.exception()) is not None:
            raise error


def _still_stopping(nodes: Sequence[str]) -> ServeError:
    return ServeError(
        f"the agent of {', '.join(nodes)} is still stopping its processes", todo="pdserve status shows what is left"
    )


class UnendingLoop:
    """Takes the steps of a loop that must not end with one of them.

    What a step raises is logged to stderr, the log of a detached launcher: the same trouble once, not at each round."""

    def __init__(self) -> None:
        self._text = ""

    async def step(self, work: Callable[[], None]) -> None:
        """Do the work of one step. Whatever it raises ends only this step."""

        async def done() -> None:
            work()

        [error] = await asyncio.gather(done(), return_exceptions=True)
        if error is not None and repr(error) != self._text:
            self._text = repr(error)
            with contextlib.suppress(OSError):  # nobody reads it any more
                traceback.print_exception(error, file=sys.stderr)


def start_seconds_by_part(
    processes: Iterable[Process], states: Mapping[str, ProcessState], *, total: float, canary: float
) -> dict[str, float]:
    """Return where the seconds of a start went, as the event `up` has them. `processes`: those that were started.

    Processes of one stage run beside each other, so the slowest counts; commands of the setup run one after the other.
    """
    started = [(process, states[process.name].start_seconds or 0.0) for process in processes]
    setup: dict[int, float] = {}
    for process, seconds in started:
        if process.is_setup:
            setup[process.start_stage] = max(seconds, setup.get(process.start_stage, 0.0))
    weights = max((seconds for process, seconds in started if process.fetches_weights), default=0.0)
    lmcache = max((seconds for process, seconds in started if process.is_lmcache), default=0.0)
    engines = max((seconds for process, seconds in started if process.is_engine), default=0.0)
    prepared = sum(setup.values())
    return {
        "total_seconds": round(total, 3),
        "setup_seconds": round(prepared, 3),
        "weights_seconds": weights,
        "lmcache_seconds": lmcache,
        "engine_seconds": engines,
        "canary_seconds": round(canary, 3),
        "orchestration_seconds": round(total - prepared - weights - lmcache - engines - canary, 3),
    }
