"""Acts when a process of a serving deployment dies, stops answering, or comes back.

A dead engine leaves routing before anything else happens. Whether it is restarted is the recipe's decision; the last
instance of a role that does not come back ends the deployment. An engine comes back to routing once KV has crossed
between it and a peer; peers with which none crosses are restarted (PeerJudge). LMCache's death is survivable: its
engines leave routing, it is restarted on the same port, and they return once they have registered again and passed a
canary. vllm-router in the proxy's place is restarted after a prefill, which it knows no longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from typing import Any

from pdserve.errors import PdserveError, ServeError, StartError
from pdserve.launch.failure import interrupted_restart, serve_error, start_error
from pdserve.launch.fleet import Fleet, InstanceRouting, Trouble, declared_death
from pdserve.launch.start_proofs import InstanceProofs, Outcome, PeerJudge
from pdserve.plan.model import LmcacheServer
from pdserve.plan.process import Process
from pdserve.reach.protocol import Died, Gone, Health, Late
from pdserve.time_limit import time_limit

_LMCACHE_TRIES = 3
_RETURNING = "to be proven"
"""Reason for holding an instance from the drain before its restart until it is proven: it ends when a recovery does."""
_IS_DOWN = " is down"
"""End of the reason for holding the engines of a cache server."""


class Recovery:
    """Reacts to troubles while serving. `fail` ends the deployment."""

    def __init__(self, fleet: Fleet, *, engine_key: str, fail: Callable[[PdserveError], None]) -> None:
        self._fleet = fleet
        self._instances = InstanceRouting(fleet)
        self._engine_key = engine_key
        self._proofs = InstanceProofs(fleet, self._instances, engine_key=engine_key)
        self._judge = PeerJudge()
        self._fail = fail
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """One recovery a process at most, by its name."""
        self._deferred_deaths: dict[str, Died | Late] = {}
        """The last death that was left to a recovery, by the name of that."""
        self._waiting: set[asyncio.Task[Any] | None] = set()
        """Recoveries of cache servers that wait for the restart of an engine: no engine must wait for them in turn."""
        self._yielding: set[str] = set()
        """Instances whose restart waits for another one of their role, which must not wait for them in turn."""
        self._router_is_stale = False
        """A prefill has come back since vllm-router was started."""
        self._restarted_at: dict[str, list[float]] = {}
        """When a death of each process was answered by a restart (time.monotonic)."""
        self._is_closed = False
        self._end: PdserveError | None = None
        """What the deployment ends with: what who waits for a verb is told."""

    def react(self, trouble: Trouble) -> None:
        """React to a trouble. Those of a process that is already being recovered belong to its recovery."""
        if isinstance(trouble, Gone):
            self._lose_node(trouble)
            return
        if trouble.name not in self._fleet.plan.names():
            return
        if (leader := self._leader(trouble.name)) in self._tasks:
            if not isinstance(trouble, Health):
                self._deferred_deaths[leader] = trouble
            return
        if isinstance(trouble, Health):
            self._react_to_health(trouble)
        elif isinstance(trouble, Late) or trouble.while_starting:
            # A start that failed has left it loading, and it never served: it waits for another `up`.
            self._begin_task(leader, self._stop_instance(leader))
        elif self._fleet.plan.process(trouble.name).is_lmcache:
            self._begin_task(trouble.name, self._recover_lmcache(self._server(trouble.name), trouble))
        else:
            self._begin_task(leader, self._recover(trouble))

    def _leader(self, name: str) -> str:
        """Return the process that stands for the instance: a recovery is of all of it."""
        return self._fleet.plan.instance_of(name)[0].name

    def _lose_node(self, gone: Gone) -> None:
        """Take all that ran on a lost node as dead, at once. What is left decides, where the recipe lets it."""
        plan, error = self._fleet.plan, serve_error(gone, self._fleet.plan, self._fleet.run)
        there = [process for process in plan.processes if process.node == gone.node]
        if plan.on_node_loss == "fail" or any(process.is_proxy for process in there):
            self._fail(error)
            return
        for leader in dict.fromkeys(self._leader(process.name) for process in there):
            if (task := self._tasks.get(leader)) is not None:
                task.cancel()
            self._instances.route(leader, "dead")
            if any(process.node != gone.node for process in plan.instance_of(leader)):
                self._begin_task(f"rest of {leader}", self._stop_instance(leader))
        for role in dict.fromkeys(process.role for process in there if process.is_engine):
            if not any(self._lives_or_returns(p.name) for p in plan.processes if p.role == role and _leads(p)):
                self._fail(error)
                return

    async def _stop_instance(self, name: str) -> None:
        await asyncio.gather(*(self._fleet.stop(process.name) for process in self._fleet.plan.instance_of(name)))

    async def restart(self, name: str) -> bool:
        """Restarts one process on request, with the rest of its instance; True when it serves again. Raises StateError
        if something else has ended the restart, and what ends the deployment if that has."""
        if self._is_closed:
            raise self._end or interrupted_restart(name)
        name = self._leader(name)
        if name not in self._tasks:
            if self._fleet.plan.process(name).is_lmcache:
                self._begin_task(name, self._recover_lmcache(self._server(name), None))
            else:
                self._begin_task(name, self._restart(name))
        await self._end_of(name, restarted=name)
        if name != "proxy" and self._fleet.plan.proxy_kind == "vllm-router":
            await self._end_of("proxy", restarted=name)  # it learns what is new about this one
        if is_ready := self._fleet.phase_of(name) == "ready":
            self._restarted_at.pop(name, None)
        return is_ready

    async def start(self, name: str) -> None:
        """Starts an instance that does not run, proves it and routes to it; a recovery of it that waits for its next
        try is ended. Raises StartError with what it died of."""
        await self._work_on(name, lambda: self._start(name))

    async def replace(self, name: str, adopt: Callable[[], None]) -> None:
        """Drains and stops an instance; starts it anew by the plan that `adopt` takes over. Raises as `start`."""
        await self._work_on(name, lambda: self._restart_once(name, adopt=adopt))

    async def replace_server(self, name: str, adopt: Callable[[], None], *, but: Collection[str]) -> None:
        """Replace a cache server as `replace` does; its engines get no requests meanwhile. `but`: engines that do not
        return to it, because they are to be replaced too."""

        async def work() -> bool:
            self._hold_engines(self._server(name))
            await self._fleet.stop(name)
            adopt()
            self._fleet.start(name)
            if not await self._fleet.outcome(name):
                await self._fleet.stop(name)
                return False
            await self._prove_all_for_server(self._server(name), but)
            return True

        await self._work_on(name, work)

    def recover_by_policy(self, name: str) -> None:
        """Leaves an instance that did not start to its restart policy."""
        if not self._is_closed:
            note = self._fleet.state.processes[name].note
            self._begin_task(self._leader(name), self._recover(declared_death(name, note, 0)))

    @property
    def is_closed(self) -> bool:
        """Tell whether the deployment ends."""
        return self._is_closed

    async def prove_pairs(self, name: str) -> None:
        """Proves that KV crosses between an instance and its peers. Raises StartError where it does not."""
        outcomes = await self._proofs.crosses(name)
        met = bool(outcomes) or self._fleet.plan.proxy_kind != "pdserve" or self._fleet.plan.mode == "aggregated"
        if not met or not await self._kv_crosses(name):
            raise StartError(
                f"no KV crosses between {name} and its peers",
                where=name,
                cause="they differ in what both sides of a transfer must agree on, or their network is not open",
                todo="pdserve logs of both; the canaries are in the history of the run",
            )

    async def stop(self, name: str) -> None:
        """Drains and stops an instance, for good or for a later `start`."""

        async def stop() -> bool:
            await self._drain_and_stop(name)
            return True

        await self._work_on(name, stop)

    async def _work_on(self, name: str, work: Callable[[], Coroutine[Any, Any, bool]]) -> None:
        """Does work as the one recovery of an instance, to which its troubles belong meanwhile."""
        if self._is_closed:
            raise self._end or interrupted_restart(name)
        leader = self._leader(name) if name in self._fleet.plan.names() else name
        while (running := self._tasks.get(leader)) is not None:
            running.cancel()
            await asyncio.wait({running})
        error: PdserveError | None = None

        async def do() -> None:
            nonlocal error
            try:
                if not await work():
                    error = self._why_not_started(leader)
            except PdserveError as failure:  # the record cannot be written
                error = failure

        self._begin_task(leader, do())
        await self._end_of(leader, restarted=leader)
        if error is not None:
            raise error
        self._restarted_at.pop(leader, None)

    def _why_not_started(self, name: str) -> StartError:
        if (death := self._deferred_deaths.get(name)) is not None:
            return start_error(death, self._fleet.plan, self._fleet.run)
        note = self._fleet.state.processes[name].note
        return StartError(f"{name} did not start: {note}", where=name, todo=f"pdserve logs {name}")

    async def _until_another_serves(self, name: str) -> None:
        """Wait, before an instance is stopped on purpose, for another one of its role that is on its way back."""
        process = self._fleet.plan.process(name)
        others = [
            each.name
            for each in self._fleet.plan.processes
            if each.role == process.role and each.instance != process.instance and _leads(each)
        ]

        def decided() -> bool:
            ready = any(self._fleet.phase_of(other) == "ready" for other in others)
            return ready or not any(other in self._tasks and other not in self._yielding for other in others)

        if not process.is_engine:
            return
        with self._yield_turn(name):
            await self._fleet.until(decided)

    @contextlib.contextmanager
    def _yield_turn(self, name: str) -> Iterator[None]:
        """Yield the turn of a process while it waits for others: no restart of another one of its role waits for it
        meanwhile."""
        self._yielding.add(name)
        self._fleet.wake()
        try:
            yield
        finally:
            self._yielding.discard(name)

    async def _end_of(self, task: str, *, restarted: str) -> None:
        """Waits for a task, if it runs, and leaves it alone if the wait is given up."""
        if (running := self._tasks.get(task)) is None:
            return
        await asyncio.wait({running})
        if running.cancelled():
            raise self._end or interrupted_restart(restarted)

    async def close(self, error: PdserveError | None) -> None:
        """Ends all recoveries for good. `error`: what ends the deployment, for those who wait for one of them."""
        self._is_closed, self._end = True, error
        await self.settle()

    async def settle(self) -> None:
        """Ends all recoveries, so that another caller decides what is started; the processes stay as they are, and
        those that are held stay held."""
        while tasks := list(self._tasks.values()):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def take_over(self, troubles: Iterable[Trouble]) -> None:
        """Take over from a start, to which all troubles belonged: deaths of those that served, and who is silent
        now."""
        for trouble in troubles:
            self.react(trouble)
        for name in self._fleet.plan.names():
            self._watch_if_silent(name)
        self._readmit_engines()

    def _readmit_engines(self) -> None:
        """Begin the return of engines that are held although what they wait for is there: a start has ended their
        recovery, or their cache server came back while another return to it ran, or while they did not answer."""
        for server in self._fleet.plan.lmcache:
            kept = (
                engine for engine in server.engines if _down_reason(server.process) in self._fleet.held.get(engine, ())
            )
            if server.process not in self._tasks and self._is_ready(server) and not all(map(self._fleet.silent, kept)):
                self._begin_task(f"return to {server.process}", self._prove_all_for_server(server))
        held = [name for name, reasons in self._fleet.held.items() if _RETURNING in reasons]
        for leader in dict.fromkeys(self._leader(name) for name in held if name in self._fleet.plan.names()):
            silent = any(self._fleet.silent(process.name) for process in self._fleet.plan.instance_of(leader))
            if (
                leader not in self._tasks
                and not silent
                and self._lives_or_returns(leader)
                and self._has_servers(leader)
            ):
                self._begin_task(leader, self._prove_again(leader))

    async def _prove_again(self, name: str) -> None:
        """Prove an instance that a start has left held, and route to it; else recover it, as after a death."""
        if await self._proven(name):
            self._route_to(name)
        elif not self._instances.lives(name)() or self._has_servers(name):
            await self._stop_failed(name)
            await self._recover(declared_death(name, "did not return after a start that came into its recovery", 0))

    def _watch_if_silent(self, name: str) -> None:
        if name in self._fleet.plan.names() and self._instances.serves(name) and self._fleet.silent(name):
            self.react(Health(name=name, responsive=False, why=self._fleet.state.processes[name].note))

    def _begin_task(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        if name in self._tasks or self._is_closed:
            work.close()
            return
        task = asyncio.create_task(work)
        self._tasks[name] = task
        task.add_done_callback(lambda done: self._forget_task(name, done))

    def _forget_task(self, name: str, task: asyncio.Task[None]) -> None:
        self._tasks.pop(name, None)
        self._fleet.wake()
        left = self._deferred_deaths.pop(name, None)
        if task.cancelled():
            return  # who has cancelled it decides from here on
        if (error := task.exception()) is not None:
            self._fail(ServeError(f"the recovery of {name} failed: {error!r}", where=name))
        elif name == "proxy":
            self._renew_router()
        for member in self._fleet.plan.instance_of(name) if name in self._fleet.plan.names() else ():
            self._watch_if_silent(member.name)  # since a time when its troubles belonged to its recovery
        if error is None:
            self._readmit_engines()
        if left is not None and self._fleet.is_dead_with_pending_stop(left.name):
            self.react(left)  # it came after the last look of the recovery

    def _server(self, name: str) -> LmcacheServer:
        return next(server for server in self._fleet.plan.lmcache if server.process == name)

    def _servers_of(self, engine: str) -> list[LmcacheServer]:
        return [server for server in self._fleet.plan.lmcache if engine in server.engines]

    def _has_servers(self, engine: str) -> bool:
        """Tell whether the servers that an engine attaches to are ready. One that is not comes back first."""
        return all(map(self._is_ready, self._servers_of(engine)))

    def _is_ready(self, server: LmcacheServer) -> bool:
        return self._fleet.phase_of(server.process) == "ready"

    # Engines and proxy ---------------------------------------------------------------------------------------------

    async def _recover(self, trouble: Died | Late) -> None:
        """Restarts a dead process as its recipe says, with back-off; otherwise counts who is left of its role."""
        name = self._leader(trouble.name)
        self._instances.route(name, "dead")
        await self._stop_instance(name)
        state = self._fleet.state.processes[name]
        rule = self._fleet.plan.process(name).restart
        delay = rule.backoff_seconds
        while rule.policy == "on-failure" and self._restarts_within(name, rule.window_seconds) < rule.max:
            state.restarts += 1
            self._restarted_at.setdefault(name, []).append(time.monotonic())
            self._fleet.record("restarting", name=name, attempt=state.restarts, after_seconds=delay)
            await asyncio.sleep(delay)
            if await self._start(name):
                return
            delay = min(delay * 2, rule.backoff_max_seconds)
        self._fail_if_last(name, serve_error(trouble, self._fleet.plan, self._fleet.run))

    def _restarts_within(self, name: str, seconds: float) -> int:
        """Count the restarts of a process in the last so many seconds."""
        since = time.monotonic() - seconds
        recent = [at for at in self._restarted_at.get(name, ()) if at > since]
        self._restarted_at[name] = recent
        return len(recent)

    def _fail_if_last(self, name: str, error: ServeError) -> None:
        """End the deployment with the last instance of a role that neither lives nor is on its way back."""
        role = self._fleet.plan.process(name).role
        others = (p.name for p in self._fleet.plan.processes if p.role == role and p.name != name and _leads(p))
        if not any(map(self._lives_or_returns, others)):
            self._fail(error)

    def _lives_or_returns(self, leader: str) -> bool:
        if leader in self._tasks:
            return not self._tasks[leader].cancelling()
        # Starting without a recovery is what an `up` that failed has left to go on.
        phases = [self._fleet.phase_of(process.name) for process in self._fleet.plan.instance_of(leader)]
        return all(phase in ("starting", "ready", "degraded") for phase in phases)

    async def _restart(self, name: str) -> None:
        if not await self._restart_once(name):
            note = self._fleet.state.processes[name].note
            await self._recover(declared_death(name, f"did not come back: {note}", 0))

    async def _restart_once(self, name: str, adopt: Callable[[], None] = lambda: None) -> bool:
        await self._until_another_serves(name)
        await self._drain_and_stop(name)
        adopt()
        return await self._start(name)

    async def _drain_and_stop(self, name: str) -> None:
        self._instances.hold(name, _RETURNING)
        await self._instances.drained(name, key=self._engine_key)
        await self._stop_instance(name)

    async def _start(self, name: str) -> bool:
        """Starts a process; an engine returns to routing only after it is attached, has answered a canary, and KV
        has crossed between it and a peer."""
        is_engine = self._fleet.plan.process(name).is_engine
        masters = [process.name for process in self._fleet.plan.processes if process.is_store_master and is_engine]
        for needed in (*(server.process for server in self._servers_of(name)), *masters):
            recovering = self._tasks.get(needed)
            if recovering is not None and recovering not in self._waiting:
                await asyncio.wait({recovering})  # without it an engine would die, or hang, in its own start
        if is_engine:
            self._judge.started(name)
            self._instances.hold(name, _RETURNING)
            self._instances.route(name, "starting")
        if name == "proxy":
            self._router_is_stale = False
        for process in self._fleet.plan.instance_of(name):
            self._fleet.start(process.name)
        if not await self._proven(name):
            await self._stop_failed(name)
            return False
        self._route_to(name)
        return True

    async def _proven(self, name: str) -> bool:
        """Wait until an instance is ready; one of engines has its patches and its servers then, and has answered."""
        lives = self._instances.lives(name)
        # Of several ranks one that is dead is waited for by the others, as long as an engine may take to load.
        if not await self._fleet.proven_while(lives, self._instances.all_ready(name)):
            return False
        return not self._fleet.plan.process(name).is_engine or (
            self._proofs.has_patches(name)
            and await self._fleet.proven_while(lives, self._proofs.attached(name, self._servers_of(name)))
            and await self._fleet.proven_while(lives, self._proofs.all_answer(name))
            and await self._fleet.proven_while(lives, self._kv_crosses(name))
        )

    async def _kv_crosses(self, name: str) -> bool:
        """Tell whether KV crosses between a new engine and its peers, as far as the fault is not theirs; broken peers
        are restarted (PeerJudge)."""
        while True:
            outcomes = await self._proofs.crosses(name)
            verdict = self._judge.judge(outcomes, time.monotonic())
            for peer in (*verdict.bad, *verdict.spared):
                self._call_bad(peer, name, outcomes, restarted=peer in verdict.bad)
            if not verdict.try_again:
                return verdict.proven
            with self._yield_turn(name):
                await asyncio.wait([self._tasks[peer] for peer in verdict.bad])

    def _call_bad(self, peer: str, new: str, outcomes: Mapping[str, Outcome], *, restarted: bool) -> None:
        crossed = [other for other, outcome in outcomes.items() if outcome == "crossed"]
        self._fleet.record("bad_peer", name=peer, new=new, crossed=crossed, restarted=restarted)
        if restarted:
            self._instances.hold(peer, _RETURNING)  # before the new engine is routed to
            self._begin_task(peer, self._restart(peer))

    def _route_to(self, name: str) -> None:
        """Route to an instance that is proven and attached to its servers."""
        lacking = {_down_reason(server.process) for server in self._servers_of(name) if not self._is_ready(server)}
        for reason in [reason for reason in self._fleet.held.get(name, ()) if reason.endswith(_IS_DOWN)]:
            if reason not in lacking:  # also of a server that the plan has no more
                self._instances.release(name, reason)
        self._instances.release(name, _RETURNING)
        if self._fleet.plan.gives_router_new_ids({name}):
            self._router_is_stale = True
        self._renew_router()

    def _renew_router(self) -> None:
        """Restart vllm-router when all engines serve: it reads engine ids from a prefill's bootstrap server when it
        starts, and never again. It waits for every engine then, so that beside a dead one it is better left as it is
        until that is back."""
        plan = self._fleet.plan
        if plan.proxy_kind != "vllm-router" or not self._router_is_stale:
            return
        if all(self._instances.serves(worker.name) for worker in plan.proxy.workers):
            self._begin_task("proxy", self._restart_router())

    async def _restart_router(self) -> None:
        """Restart the router. Nothing waits for it: an engine that dies meanwhile must be free to come back."""
        if not await self._restart_once("proxy"):
            await self._recover(declared_death("proxy", "did not come back after a prefill did", 0))

    async def _stop_failed(self, name: str) -> None:
        state, died = self._fleet.state.processes[name], self._instances.first_dead(name)
        if died != name:
            unproven = "without its patches, not attached to LMCache, or a canary has failed"
            note = unproven if died is None else f"{died} {self._fleet.state.processes[died].note}"
            state.phase, state.note = "dead", note
        self._instances.route(name, "dead")
        await self._stop_instance(name)

    # Silence -------------------------------------------------------------------------------------------------------

    def _react_to_health(self, trouble: Health) -> None:
        is_cache = self._fleet.plan.process(trouble.name).is_lmcache
        if not trouble.responsive:
            if is_cache:
                self._hold_engines(self._server(trouble.name))
            self._begin_task(f"watch {trouble.name}", self._give_up_on(trouble))
        else:
            self._readmit_engines()

    async def _give_up_on(self, trouble: Health) -> None:
        """Stop a process that does not answer for too long, and treat it as dead."""
        seconds = self._fleet.plan.timeouts.unresponsive_seconds
        state = self._fleet.state.processes[trouble.name]

        def over() -> bool:
            return state.phase != "degraded" or not self._fleet.silent(trouble.name)

        try:
            async with time_limit(seconds - self._fleet.silent_seconds(trouble.name)):
                await self._fleet.until(over)
        except TimeoutError:
            self.react(self._fleet.give_up(trouble.name, trouble.why))

    # LMCache -------------------------------------------------------------------------------------------------------

    async def _recover_lmcache(self, server: LmcacheServer, trouble: Died | Late | None) -> None:
        """Recover an LMCache server: engines out of routing, server back on its port, engines registered and proven,
        engines back."""
        self._hold_engines(server)
        self._fleet.record("cache_down", name=server.process, engines=list(server.engines))
        await self._fleet.stop(server.process)
        if trouble is not None and server.on_death == "fail":
            self._fail(serve_error(trouble, self._fleet.plan, self._fleet.run))
            return
        state = self._fleet.state.processes[server.process]
        for _ in range(_LMCACHE_TRIES):
            state.restarts += 1
            self._fleet.start(server.process)
            if await self._fleet.outcome(server.process):
                await self._prove_all_for_server(server)
                if self._instances.serves(server.process):
                    return
                self._hold_engines(server)  # it died while they returned
            await self._fleet.stop(server.process)
        self._fail(
            serve_error(trouble, self._fleet.plan, self._fleet.run)
            if trouble is not None
            else ServeError(f"{server.process} did not come back in {_LMCACHE_TRIES} tries", where=server.process)
        )

    def _hold_engines(self, server: LmcacheServer) -> None:
        for engine in server.engines:
            self._fleet.hold(engine, _down_reason(server.process))

    async def _prove_all_for_server(self, server: LmcacheServer, but: Collection[str] = ()) -> None:
        """Prove every living engine of a server that answers again, and return it, or restart it. Once the server is
        gone again, or silent, no more of them are: who called this, or what ends the silence, goes on."""
        gone = asyncio.ensure_future(self._fleet.until(lambda: not self._is_ready(server)))
        try:
            for engine in server.engines:
                if engine not in but:
                    await self._prove_for_server(engine, server, gone)
        finally:
            gone.cancel()

    async def _prove_for_server(self, engine: str, server: LmcacheServer, gone: asyncio.Future[None]) -> None:
        reason, lives = _down_reason(server.process), self._instances.lives(engine)

        def both() -> bool:
            return self._is_ready(server) and lives()

        if gone.done() or reason not in self._fleet.held.get(engine, ()):
            return
        if engine in self._tasks or not self._instances.serves(engine):
            self._fleet.release(engine, reason)  # what else keeps it out is still there
            return
        if self._fleet.silent(engine):
            return  # it is proven once it answers again (`_readmit_engines`)
        attached = await self._fleet.proven_while(both, self._proofs.attached(engine, [server]))
        proven = attached and await self._fleet.proven_while(both, self._proofs.answers(engine))
        if gone.done() or not self._is_ready(server):
            return
        if proven or engine in self._tasks or not self._instances.serves(engine):
            self._fleet.release(engine, reason)  # if it died meanwhile, it is another recovery's
            return
        if self._fleet.silent(engine):
            return  # as above
        self._fleet.record("engine_not_back", name=engine, attached=attached)
        self._waiting.add(asyncio.current_task())
        try:
            self._begin_task(engine, self._restart_for_server(engine, server))
            await asyncio.wait({self._tasks[engine]})
        finally:
            self._waiting.remove(asyncio.current_task())

    async def _restart_for_server(self, engine: str, server: LmcacheServer) -> None:
        """Restart an engine that does not return to its server, as its own recovery, so that what becomes of it
        meanwhile begins no second one."""
        back = await self._restart_once(engine)
        self._fleet.release(engine, _down_reason(server.process))
        if not back:
            await self._recover(declared_death(engine, f"did not come back after {server.process} did", 0))


def _leads(process: Process) -> bool:
    """Tell whether a process leads its instance, or has none: followers do not serve by themselves."""
    return process.instance in (None, process.name)


def _down_reason(server: str) -> str:
    return f"{server}{_IS_DOWN}"
