"""A deployment without processes: the real launcher, with agents that a test plays."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from pdserve.errors import PdserveError
from pdserve.launch.fleet import Fleet
from pdserve.launcher import Launcher
from pdserve.plan.environment import ENGINE_KEY
from pdserve.plan.model import Plan
from pdserve.plan.node import Node
from pdserve.plan.process import HttpProbe
from pdserve.reach.protocol import (
    Answered,
    Died,
    Event,
    Gone,
    Health,
    Hello,
    Method,
    Order,
    Push,
    Ready,
    Start,
    Stop,
    Stopped,
)
from pdserve.recipe.sections import RestartPolicy
from pdserve.run import inbox
from pdserve.run.directory import RunDir
from pdserve.run.inbox import Apply, Fetch, Reply, Request
from pdserve.system.stop_signals import hold_stops
from tests.launch.records import GONE, recorded_state
from tests.plan import kit

LIMIT = 120
"""Seconds until a test gives up waiting: a limit, not a measurement."""
ONE_TOKEN = Answered(id=0, status=200, body='{"choices": [{}]}')
_LOOK_SECONDS = 0.005
REFUSED = Answered(id=0, status=None, error="connection refused", refused=True)


def plan(prefills: int = 1, decodes: int = 1, *, nodes: int = 1, restart: str = "never", **changes: Any) -> Plan:
    """A plan for fakes: nothing reports patches, and an engine that is restarted is so at once. `changes`: of its
    timeouts. With two nodes the first decode is on the second one, everything else on the first."""
    sections: dict[str, Any] = {"prefill": {"instances": prefills}, "decode": {"instances": decodes}}
    hosts = kit.hosts(*[0] * nodes) if nodes > 1 else ()
    return adapted(kit.plan(kit.recipe(sections), *hosts), restart=restart, **changes)


def plan_with_cache(engines: int = 1, *, restart: str = "never", **changes: Any) -> Plan:
    """The same with one LMCache server beside engines that do both."""
    return adapted(kit.plan(kit.recipe(kit.aggregated(instances=engines))), restart=restart, **changes)


def adapted(planned: Plan, *, restart: str = "never", **changes: Any) -> Plan:
    """Any other plan, made one for fakes in the same way."""
    processes = []
    for process in planned.processes:
        update: dict[str, Any] = {"ranks": None}
        if process.is_engine or process.is_proxy:
            policy = restart if process.is_engine else "on-failure"
            rule = {"policy": policy, "backoff_seconds": 0.001, "backoff_max_seconds": 0.001}
            update["restart"] = RestartPolicy.model_validate(rule)
        processes.append(process.model_copy(update=update))
    timeouts = planned.timeouts.model_copy(update=changes)
    return planned.model_copy(update={"processes": tuple(processes), "timeouts": timeouts})


class PlayedAgent:
    """In the place of a link. An order is obeyed at once, unless the deployment holds it."""

    silent = False

    def __init__(self, node: Node, receive: Callable[[Event], None], deployment: Played) -> None:
        self.node = node.name
        self._receive = receive
        self._deployment = deployment
        self._lives: set[str] = set()
        hello = Hello(node=node.name, agent=GONE, guard=GONE, hostname="elsewhere")
        asyncio.get_running_loop().call_soon(receive, hello)

    def send(self, order: Order) -> None:
        """A start beside an earlier life is what no launcher may order."""
        if isinstance(order, Start):
            name, answer = order.process.name, Ready(name=order.process.name, seconds=1)
            assert name not in self._lives, f"{name} was started without a stop of its last life"
            self._lives.add(name)
            self._deployment.ordered("start", name, lambda: self._receive(answer))
        elif isinstance(order, Stop):
            self._deployment.ordered("stop", order.name, lambda name=order.name: self._end(name))  # type: ignore[misc]
        elif isinstance(order, Push):
            self._deployment.told.append(json.loads(order.line))

    def _end(self, name: str) -> None:
        if name in self._deployment.unending:
            self._receive(Stopped(name=name, forced=True, seconds=1, left=(7,)))
            return
        self._lives.discard(name)
        self._receive(Stopped(name=name, forced=False, seconds=1))

    async def ask(
        self,
        method: Method,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: str | None = None,
        seconds: float,
    ) -> Answered:
        self._deployment.asked.append(url)
        for part, answered in self._deployment.slow.items():
            if part in url:
                await answered.wait()
        return self._deployment.answer(url)

    async def close(self, seconds: float) -> bool:
        return True


class Played:
    """A deployment whose engines do what the test says."""

    def __init__(self, folder: Path, planned: Plan) -> None:
        self.plan = planned
        self.run_dir = RunDir.create(folder, planned.name, "run-1")
        self.run_dir.write(self.run_dir.plan, planned.model_dump_json())
        self.run_dir.write(self.run_dir.recipe, "name: first")
        self.state = recorded_state(name=planned.name, host="here", started_at=time.time())
        self.orders: list[tuple[str, str]] = []
        """What was ordered so far: (start or stop, name)."""
        self.held: set[tuple[str, str]] = set()
        """Orders that wait until the test lets them be obeyed."""
        self.failing: dict[str, int] = {}
        """How many of its next starts a process dies in."""
        self.told: list[dict[str, Any]] = []
        """What the proxy was told so far."""
        self.unending: set[str] = set()
        """Processes that no KILL ends."""
        self.answers: dict[str, Answered] = {}
        """What is answered to requests whose URL has this in it."""
        self.slow: dict[str, asyncio.Event] = {}
        """Requests whose URL has this in it are answered only after that."""
        self.asked: list[str] = []
        """URLs of requests from the nodes."""
        self.events: list[dict[str, Any]] = []
        self.error: PdserveError | None = None
        self.is_over = False
        self._waiting: dict[tuple[str, str], Callable[[], None]] = {}
        secrets = {name for process in planned.processes for name in process.env.secrets.values()}
        self._launcher = Launcher(
            planned,
            self.run_dir,
            self.state,
            secrets={**dict.fromkeys(secrets, "secret"), ENGINE_KEY: "key"},
            open_agent=self._open,  # type: ignore[arg-type]
            on_event=self.events.append,
            began=time.monotonic(),
        )

    async def run(self) -> None:
        """Serves until it is over; the error with which it ended is kept."""
        try:
            with hold_stops():
                await self._launcher.run()
        except PdserveError as error:
            self.error = error
        finally:
            self.is_over = True

    def _open(self, node: Node, receive: Callable[[Event], None]) -> PlayedAgent:
        self._receive = receive
        return PlayedAgent(node, receive, self)

    def ordered(self, verb: str, name: str, obey: Callable[[], None]) -> None:
        """Of an agent: what it was ordered, and how it does that."""
        self.orders.append((verb, name))
        if verb == "start" and self.failing.get(name):
            self.failing[name] -= 1
            died = Died(name=name, pid=7, code=1, how="exited", seconds=1, while_starting=True)
            asyncio.get_running_loop().call_soon(self._receive, died)
        elif (verb, name) in self.held:
            self._waiting[verb, name] = obey
        else:
            asyncio.get_running_loop().call_soon(obey)

    def obey(self, verb: str, name: str) -> None:
        """What was held is done now."""
        self.held.discard((verb, name))
        self._waiting.pop((verb, name))()

    def obey_all(self) -> None:
        """Nothing is held any more."""
        self.held.clear()
        while self._waiting:
            self._waiting.popitem()[1]()

    def answer(self, url: str) -> Answered:
        """Of a request from a node: everything is attached and answers, unless the test says otherwise."""
        for part, answer in self.answers.items():
            if part in url:
                return answer
        if url.endswith("/status"):
            workers = ", ".join(map(str, range(sum(server.expected_workers for server in self.plan.lmcache))))
            return Answered(id=0, status=200, body=f'{{"registered_gpu_ids": [{workers}]}}')
        return ONE_TOKEN

    def says(self, event: Event) -> None:
        """An agent reports something."""
        self._receive(event)

    def dies(self, name: str, member: str | None = None) -> None:
        """A process ends without being asked to; what is left of its tree lives on."""
        self._receive(Died(name=name, pid=7, code=1, how="exited", seconds=1, while_starting=False, member=member))

    def is_silent(self, name: str) -> None:
        """A process that is ready answers nothing any more."""
        self._receive(Health(name=name, responsive=False, why="PID 7 is stopped (SIGSTOP)"))

    def answers_again(self, name: str) -> None:
        """And now it does."""
        self._receive(Health(name=name, responsive=True))

    def is_lost(self, node: str) -> None:
        """Nothing is heard of a node any more."""
        self._receive(Gone(node=node, how="its pipe closed"))

    def canary_of(self, name: str) -> str:
        """Return what the URL of its canary has in it, and that of no other one."""
        probe = self.plan.process(name).probe
        assert isinstance(probe, HttpProbe)
        return f":{probe.port}/v1/completions"

    def canary_asked(self, name: str) -> bool:
        """Whether its canary was asked for, since `asked` was cleared."""
        return any(self.canary_of(name) in url for url in self.asked)

    def phase(self, name: str) -> str:
        """Of one process."""
        return self.state.processes[name].phase

    def phases(self) -> set[str]:
        """Of all processes."""
        return {process.phase for process in self.state.processes.values()}

    def orders_of(self, name: str) -> list[str]:
        """Return the verbs of the orders for one process."""
        return [verb for verb, whose in self.orders if whose == name]

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits for it; fails if the deployment ends without it."""
        async with asyncio.timeout(LIMIT):
            while not holds():
                assert not self.is_over, self.error
                await asyncio.sleep(_LOOK_SECONDS)

    async def over(self) -> None:
        """Waits until all of it was stopped."""
        async with asyncio.timeout(LIMIT):
            while not self.is_over:
                await asyncio.sleep(_LOOK_SECONDS)

    async def serving(self) -> None:
        """Waits until it is ready; what was ordered for that is forgotten."""
        await self.until(lambda: self.state.phase == "ready")
        self.orders.clear()

    def up(self, to: Plan, *, replace: bool = False) -> asyncio.Task[Reply]:
        """Ask for another plan, as `pdserve up` does."""
        return self.ask(Apply(plan=to, recipe="name: another", replace=replace))

    def ask(self, request: Request) -> asyncio.Task[Reply]:
        """What a command asks of the launcher, and the answer."""
        return asyncio.create_task(
            asyncio.to_thread(inbox.ask, self.run_dir, request, seconds=LIMIT, alive=lambda: not self.is_over)
        )

    async def looks(self) -> None:
        """Returns when the launcher has taken a request that came later than all that was asked before."""
        node = self.plan.nodes[0].name
        await self.ask(Fetch(node=node, method="GET", url="http://any", seconds=LIMIT))

    @property
    def fleet(self) -> Fleet:
        """The hands of the launcher."""
        return self._launcher._fleet


@asynccontextmanager
async def played(folder: Path, planned: Plan) -> AsyncIterator[Played]:
    """A deployment that is being started; it is over when the block ends."""
    deployment = Played(folder, planned)
    running = asyncio.create_task(deployment.run())
    try:
        yield deployment
    finally:
        deployment.obey_all()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


@asynccontextmanager
async def serving_deployment(folder: Path, planned: Plan) -> AsyncIterator[Played]:
    """A deployment that serves; it is over when the block ends."""
    async with played(folder, planned) as deployment:
        await deployment.serving()
        yield deployment
