"""Looks at all nodes at once, through the ways by which their agents will be started, before anything is started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from pdserve.candidates import Candidate, Candidates
from pdserve.errors import PreflightError
from pdserve.outlet import Outlet
from pdserve.plan.model import Node, Plan
from pdserve.plan.reach import Srun, reach_argv
from pdserve.preflight.address import Chosen, choose, find_addresses
from pdserve.preflight.agreement import Skew, clock_skew, compare
from pdserve.preflight.cross_node import cross_node
from pdserve.preflight.facts import NodeFacts
from pdserve.preflight.finding import Finding
from pdserve.preflight.run_dir import remove_mark, write_mark
from pdserve.process import pid_end, spawn_piped
from pdserve.recipe.model import Recipe
from pdserve.recipe.nodes import Network
from pdserve.scout import ANSWERS, Answer, Check, Connect, Found, Here, Listen, Question, Ready, WhatIs
from pdserve.slurm_variables import for_srun
from pdserve.versions import Versions

START_SECONDS = 120.0
"""Until a scout says that it is there: a login or a scheduler comes before it, and perhaps a container."""
_ANSWER_SECONDS = 60.0
_LEAVE_SECONDS = 10.0
_LINE_LIMIT = 16 * 1024 * 1024
AnswerT = TypeVar("AnswerT", bound=Answer)
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Survey:
    """What is known of all nodes. `findings` hold at least one failure when the plan must not be started."""

    plan: Plan
    findings: tuple[Finding, ...]
    addresses: Mapping[str, Chosen]
    facts: Mapping[str, NodeFacts]


class _Scout:
    """The launcher's end of one scout."""

    def __init__(self, candidate: Candidate, run_dir: Path) -> None:
        self.name = candidate.name
        self._log = run_dir / "logs" / f"scout@{candidate.name}.log"
        argv = [*candidate.command, "-m", "pdserve.scout"]
        self._popen = spawn_piped(
            reach_argv(candidate.reach, candidate.name, f"scout-{candidate.name}", argv),
            env=for_srun(os.environ) if isinstance(candidate.reach, Srun) else os.environ,
            stderr=self._log,
        )
        assert self._popen.stdin is not None
        self._outlet = Outlet(self._popen.stdin.fileno())
        self._stream = asyncio.StreamReader(limit=_LINE_LIMIT)

    async def begin(self) -> None:
        """Raises PreflightError when it does not come."""
        assert self._popen.stdout is not None
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(self._stream), self._popen.stdout
        )
        await self._hear(Ready, START_SECONDS)

    async def ask(self, question: Question, kind: type[AnswerT]) -> AnswerT:
        """Raises PreflightError when it does not answer."""
        self._outlet.write(question.model_dump_json().encode() + b"\n")
        return await self._hear(kind, _ANSWER_SECONDS)

    async def _hear(self, kind: type[AnswerT], seconds: float) -> AnswerT:
        try:
            async with asyncio.timeout(seconds):
                line = await self._stream.readline()
        except TimeoutError:
            raise self._error(f"{self.name} has not answered within {seconds:.0f} s") from None
        if not line:
            raise self._error(f"nothing can be started on {self.name}")
        try:
            answer = ANSWERS.validate_json(line)
        except ValidationError:
            answer = None
        if not isinstance(answer, kind):
            raise self._error(
                f"{self.name} answered with something else than was asked for",
                "another version of pdserve there, or a login script that prints",
                line.decode(errors="replace").rstrip()[:200],
            )
        return answer

    def _error(self, what: str, cause: str | None = None, said: str = "") -> PreflightError:
        with contextlib.suppress(OSError):
            said = said or self._log.read_text(errors="replace")
        return PreflightError(
            what,
            where=f"scout@{self.name}",
            cause=cause
            or "the way there (ssh, srun, a container), or pdserve and its interpreter, which must be there "
            "under the same path as here",
            todo=f"read {self._log}; leave the node out with exclude_nodes",
            evidence=tuple(said.splitlines()[-8:]),
        )

    async def end(self) -> None:
        """Closes the pipe; what does not leave then is killed, because it owns nothing."""
        assert self._popen.stdin is not None
        self._outlet.close()
        self._popen.stdin.close()
        try:
            await asyncio.wait_for(pid_end(self._popen.pid), _LEAVE_SECONDS)
        except TimeoutError:
            self._popen.kill()
            await pid_end(self._popen.pid)
        self._popen.wait()


@asynccontextmanager
async def _scouts(machines: Sequence[Candidate], run_dir: Path) -> AsyncIterator[list[_Scout]]:
    scouts = [_Scout(one, run_dir) for one in machines]
    try:
        await _all(scout.begin() for scout in scouts)
        yield scouts
    finally:
        await asyncio.gather(*(scout.end() for scout in scouts))


async def survey(
    candidates: Candidates,
    recipe: Recipe,
    *,
    run_dir: Path,
    plan_for: Callable[[Sequence[Node], Versions], Plan],
) -> Survey:
    """Facts of all nodes, the plan for them, and what keeps it from being started.

    Raises PreflightError when a node cannot be looked at, or has no address that the others could use.
    """
    machines = candidates.machines
    async with _scouts(machines, run_dir) as scouts:
        known = dict(zip((one.name for one in machines), await _facts(scouts, machines, recipe), strict=True))
        facts = {name: one for name, (one, _) in known.items()}
        network = candidates.network or recipe.network
        addresses = {one.name: _address(one, facts[one.name], machines, network) for one in machines}
        nodes = [_node(one, facts[one.name], addresses[one.name]) for one in machines]
        # Whether the others have the same is one of the findings.
        plan = plan_for(nodes, facts[machines[0].name].versions)
        findings = [
            *find_addresses(addresses, same_subnet=network is not None),
            *compare(plan, facts, {name: skew for name, (_, skew) in known.items()}),
        ]
        mark = write_mark(run_dir)
        try:
            checks = [scout.ask(Check(plan=plan, node=scout.name, mark=mark), Found) for scout in scouts]
            findings += [finding for found in await _all(checks) for finding in found.findings]
        finally:
            remove_mark(run_dir)
        findings += await _reach(scouts, plan)
    return Survey(plan, tuple(findings), addresses, facts)


async def _facts(
    scouts: Sequence[_Scout], machines: Sequence[Candidate], recipe: Recipe
) -> list[tuple[NodeFacts, Skew]]:
    async def one(scout: _Scout) -> tuple[NodeFacts, Skew]:
        others = tuple(machine.target for machine in machines if machine.name != scout.name)
        sent = time.time()
        question = WhatIs(platform=recipe.platform, targets=others, python=recipe.engine.python)
        facts = (await scout.ask(question, Here)).facts
        return facts, clock_skew(facts, sent=sent, received=time.time())

    return await _all(one(scout) for scout in scouts)


def _address(one: Candidate, facts: NodeFacts, machines: Sequence[Candidate], network: Network | None) -> Chosen:
    if len(machines) == 1 and network is None and one.address is None:
        return Chosen("127.0.0.1", None, None, "the only node")
    others = [machine.target for machine in machines if machine.name != one.name]
    return choose(one.name, facts, network=network, configured=one.address, others=others)


def _node(one: Candidate, facts: NodeFacts, address: Chosen) -> Node:
    return Node(
        name=one.name,
        address=address.address,
        devices=facts.devices_visible if one.devices is None else one.devices,
        hostname=facts.hostname,
        reach=one.reach,
        command=one.command,
    )


async def _reach(scouts: Sequence[_Scout], plan: Plan) -> list[Finding]:
    """All listen before anybody connects, and until everybody has."""
    targets = cross_node(plan)
    if not targets:
        return []
    listening = await _all(scout.ask(Listen(node=scout.name, targets=targets), Found) for scout in scouts)
    reached = await _all(scout.ask(Connect(node=scout.name, targets=targets), Found) for scout in scouts)
    return [finding for found in (*listening, *reached) for finding in found.findings]


async def _all(works: Iterable[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """All results, or the first error at once."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
