"""What happens when a process of a serving deployment dies, stops answering, or comes back.

A dead engine leaves routing before anything else happens. Whether it is restarted is the recipe's decision; the last
instance of a role that does not come back ends the deployment. LMCache's death is survivable: its engines leave
routing, it is restarted on the same port, and they return once they have registered again and passed a canary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from pdserve.canary import one_token
from pdserve.errors import PdserveError, ServeError
from pdserve.failure import serve_error
from pdserve.fleet import Fleet, Trouble
from pdserve.lmcache_server import wait_attached
from pdserve.plan.model import HttpProbe, LmcacheServer
from pdserve.protocol import Died, Gone, Health, Late

_LMCACHE_TRIES = 3


class Recovery:
    """Reacts to troubles while serving. `fail` ends the deployment; it is called once at most by each reaction."""

    def __init__(self, fleet: Fleet, *, engine_key: str, fail: Callable[[PdserveError], None]) -> None:
        self._fleet = fleet
        self._engine_key = engine_key
        self._fail = fail
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def react(self, trouble: Trouble) -> None:
        """One trouble. Those of a process that is already being recovered belong to its recovery."""
        if isinstance(trouble, Gone):
            self._fail(serve_error(trouble, self._fleet.plan, self._fleet.run))
            return
        if trouble.name in self._tasks:
            return
        role = self._fleet.plan.process(trouble.name).role
        if isinstance(trouble, Health):
            if role == "lmcache":
                self._hold_engines_of(trouble.name, trouble.responsive)
            if not trouble.responsive:
                self._begin(f"watch {trouble.name}", self._give_up_on(trouble))
        elif role == "lmcache":
            self._begin(trouble.name, self._recover_lmcache(self._server(trouble.name), trouble))
        else:
            self._begin(trouble.name, self._recover(trouble))

    async def restart(self, name: str) -> bool:
        """Restarts one process because somebody asked for it; True when it serves again."""
        if name in self._tasks:
            await asyncio.shield(self._tasks[name])
            return self._fleet.phase_of(name) == "ready"
        if self._fleet.plan.process(name).role == "lmcache":
            self._begin(name, self._recover_lmcache(self._server(name), None))
        else:
            self._begin(name, self._restart_once(name))
        await asyncio.shield(self._tasks[name])
        return self._fleet.phase_of(name) == "ready"

    async def close(self) -> None:
        """Ends all recoveries; the processes stay as they are."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        if name in self._tasks:
            work.close()
            return
        task = asyncio.create_task(work)
        self._tasks[name] = task
        task.add_done_callback(lambda _: self._tasks.pop(name, None))

    def _server(self, name: str) -> LmcacheServer:
        return next(server for server in self._fleet.plan.lmcache if server.process == name)

    # Engines and proxy ---------------------------------------------------------------------------------------------

    async def _recover(self, trouble: Died | Late) -> None:
        """Restarts a dead process as its recipe says, with back-off; otherwise counts who is left of its role."""
        name = trouble.name
        process = self._fleet.plan.process(name)
        await self._fleet.stop(name)
        state = self._fleet.state.processes[name]
        rule = process.restart
        delay = rule.backoff_seconds
        while rule.policy == "on-failure" and state.restarts < rule.max:
            state.restarts += 1
            self._fleet.record("restarting", name=name, attempt=state.restarts, after_seconds=delay)
            await asyncio.sleep(delay)
            if await self._start(name):
                return
            delay = min(delay * 2, rule.backoff_max_seconds)
        if not any(
            other.role == process.role and (self._serves(other.name) or other.name in self._tasks)
            for other in self._fleet.plan.processes
            if other.name != name
        ):
            self._fail(serve_error(trouble, self._fleet.plan, self._fleet.run))

    def _serves(self, name: str) -> bool:
        return self._fleet.phase_of(name) in ("ready", "degraded")

    async def _restart_once(self, name: str) -> None:
        self._fleet.route(name, "draining")
        await self._fleet.stop(name)
        await self._start(name)

    async def _start(self, name: str) -> bool:
        """Starts a process; an engine returns to routing only after it is attached and has answered a canary."""
        is_engine = self._fleet.plan.process(name).role not in ("proxy", "lmcache")
        if is_engine:
            self._fleet.held.add(name)
            self._fleet.route(name, "starting")
        self._fleet.start(name)
        if not await self._fleet.outcome(name):
            await self._stop_failed(name)
            return False
        if not is_engine:
            return True
        servers = [server for server in self._fleet.plan.lmcache if name in server.engines]
        if await self._attached(servers) and await self._answers(name):
            self._return_to_routing(name)
            return True
        await self._stop_failed(name)
        return False

    async def _stop_failed(self, name: str) -> None:
        state = self._fleet.state.processes[name]
        if state.phase != "dead":
            state.phase, state.note = "dead", "not attached to LMCache, or no answer to its canary"
        self._fleet.route(name, "dead")
        await self._fleet.stop(name)

    def _return_to_routing(self, name: str) -> None:
        self._fleet.held.discard(name)
        state = self._fleet.state.processes[name]
        if state.phase == "degraded":
            state.phase, state.note = "ready", ""
        self._fleet.route(name, "ready")

    async def _attached(self, servers: list[LmcacheServer]) -> bool:
        # Engines of a server whose other engine is dead as well can never be complete: count those that live.
        seconds = self._fleet.plan.timeouts.attach_seconds
        living = [server.model_copy(update={"expected_workers": self._expected(server)}) for server in servers]
        return all(found.complete for found in await wait_attached(living, seconds=seconds))

    def _expected(self, server: LmcacheServer) -> int:
        living = sum(1 for engine in server.engines if self._serves(engine))
        return server.expected_workers * living // len(server.engines)

    async def _answers(self, name: str) -> bool:
        probe = self._fleet.plan.process(name).probe
        if not isinstance(probe, HttpProbe):
            return True
        canary = await one_token(
            f"http://{probe.host}:{probe.port}",
            self._fleet.plan.served_name,
            seconds=self._fleet.plan.timeouts.canary_seconds,
            key=self._engine_key,
        )
        self._fleet.record("canary", name=name, ok=canary.ok, seconds=round(canary.seconds, 3), said=canary.said)
        return canary.ok

    # Silence -------------------------------------------------------------------------------------------------------

    async def _give_up_on(self, trouble: Health) -> None:
        """A process that does not answer for too long is stopped and treated as dead."""
        seconds = self._fleet.plan.timeouts.unresponsive_seconds
        state = self._fleet.state.processes[trouble.name]
        try:
            await asyncio.wait_for(self._fleet.until(lambda: state.phase != "degraded"), seconds)
        except TimeoutError:
            identity = state.id
            died = Died(
                name=trouble.name,
                pid=identity.pid if identity else 0,
                code=None,
                how=f"did not answer for {seconds:.0f} s ({trouble.why})",
                seconds=seconds,
                while_starting=False,
            )
            state.phase, state.note = "dead", died.how
            self._fleet.route(trouble.name, "dead")
            self._fleet.record("given_up", name=trouble.name, why=died.how)
            self.react(died)

    # LMCache -------------------------------------------------------------------------------------------------------

    def _hold_engines_of(self, server_name: str, responsive: bool) -> None:
        for engine in self._server(server_name).engines:
            if not responsive:
                self._hold(engine, f"{server_name} does not answer")
            elif engine not in self._tasks and engine in self._fleet.held:
                self._return_to_routing(engine)
        self._fleet.record("cache_responsive" if responsive else "cache_unresponsive", name=server_name)

    def _hold(self, engine: str, why: str) -> None:
        self._fleet.held.add(engine)
        state = self._fleet.state.processes[engine]
        if state.phase == "ready":
            state.phase, state.note = "degraded", why
        self._fleet.route(engine, "draining")

    async def _recover_lmcache(self, server: LmcacheServer, trouble: Died | Late | None) -> None:
        """Engines out of routing, server back on its port, engines registered and proven, engines back."""
        for engine in server.engines:
            self._hold(engine, f"{server.process} is down")
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
                await self._return_engines(server)
                return
            await self._fleet.stop(server.process)
        self._fail(
            serve_error(trouble, self._fleet.plan, self._fleet.run)
            if trouble is not None
            else ServeError(f"{server.process} did not come back in {_LMCACHE_TRIES} tries", where=server.process)
        )

    async def _return_engines(self, server: LmcacheServer) -> None:
        attached = await self._attached([server])
        for engine in server.engines:
            if not self._serves(engine):
                continue
            if attached and await self._answers(engine):
                self._return_to_routing(engine)
                continue
            self._fleet.record("engine_not_back", name=engine, attached=attached)
            await self._restart_once(engine)
            if self._fleet.phase_of(engine) != "ready":
                died = Died(
                    name=engine, pid=0, code=None, how=f"did not come back after {server.process} was restarted",
                    seconds=0, while_starting=False,
                )  # fmt: skip
                await self._recover(died)
                continue
            attached = await self._attached([server])
