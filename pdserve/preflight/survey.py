"""Looks at all nodes at once, through the ways by which their agents will be started, before anything is started."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from pdserve.errors import PreflightError
from pdserve.installed.versions import Versions
from pdserve.plan.model import Plan
from pdserve.plan.node import Node, Ssh, reach_argv, with_agent
from pdserve.preflight.agreement import (
    AddressQuery,
    ChosenAddress,
    Skew,
    choose_all,
    clock_skew,
    compare,
    find_addresses,
    find_unnamed_network,
)
from pdserve.preflight.container_images import ask_all
from pdserve.preflight.fabric import Wish, try_fabric
from pdserve.preflight.facts import NodeFacts, own_pdserve
from pdserve.preflight.finding import Finding, join_errors
from pdserve.preflight.node_checks import remove_mark, write_mark
from pdserve.preflight.node_probe import (
    ANSWERS,
    Answer,
    Check,
    Connect,
    Findings,
    Here,
    Listen,
    Listens,
    ProbeReady,
    Question,
    WhatIs,
)
from pdserve.preflight.reachability import cross_node_ports
from pdserve.preflight.resources import given_back
from pdserve.reach.candidates import Candidate, Candidates
from pdserve.reach.containers import cannot_run_error, container_cause, docker_hangs, until_docker_hangs
from pdserve.reach.link import Channel
from pdserve.recipe.model import Recipe
from pdserve.run.change import Change
from pdserve.run.directory import RunDir
from pdserve.time_limit import time_limit

START_SECONDS = 120.0
"""Until a probe answers: a login or a scheduler comes before it, and perhaps a container."""
_ANSWER_SECONDS = 60.0
_LEAVE_SECONDS = 10.0
_LOGIN_SECONDS = 5.0
_STEP_SECONDS = 15.0
"""How much longer the others are waited for once one node has failed: for a login after the connection, or a step of
Slurm. One error shall name all nodes that do not answer, and a node that hangs shall not delay it for as long as a
container may take."""
AnswerT = TypeVar("AnswerT", bound=Answer)
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Survey:
    """Holds all that is known of the nodes. `findings` hold at least one failure when the plan must not be started."""

    plan: Plan
    findings: tuple[Finding, ...]
    addresses: Mapping[str, ChosenAddress]
    facts: Mapping[str, NodeFacts]


class _Probe:
    """The end here of one node probe. Raises PreflightError where the way to it cannot be run here."""

    def __init__(self, candidate: Candidate, run_dir: Path) -> None:
        self.name = candidate.name
        reach = candidate.reach
        self.patience = reach.connect_seconds + _LOGIN_SECONDS if isinstance(reach, Ssh) else _STEP_SECONDS
        self.log = run_dir / "logs" / f"probe@{candidate.name}.log"
        self._contained = len(candidate.command) > 1
        self._reach = reach if candidate.command[:1] == ("docker",) else None
        """The way to the docker that holds it."""
        self._silent = False
        """Its docker hangs: it can neither be heard nor ordered to leave."""
        self._logged_before = self.log.stat().st_size if self.log.exists() else 0
        """By earlier probes of this run directory, in bytes of the log."""
        argv = [*candidate.command, "-m", "pdserve.preflight.node_probe"]
        try:
            self._channel = Channel.open(reach, candidate.name, f"probe-{candidate.name}", argv, log=self.log)
        except OSError as error:
            raise cannot_run_error(
                reach_argv(reach, self.name, "", argv)[0], error, where=f"probe@{self.name}"
            ) from error

    async def begin(self) -> None:
        """Wait until the probe is there. Raises PreflightError when it does not come."""
        await self._answer(ProbeReady, START_SECONDS)

    async def ask(self, question: Question, kind: type[AnswerT]) -> AnswerT:
        """Ask the probe a question, and return its answer. Raises PreflightError when it does not answer."""
        self._channel.send(question)
        return await self._answer(kind, _ANSWER_SECONDS)

    async def _answer(self, kind: type[AnswerT], seconds: float) -> AnswerT:
        try:
            async with time_limit(seconds):
                line = await self._line()
        except TimeoutError:
            raise self._error(f"{self.name} has not answered within {seconds:.0f} s") from None
        if not line:
            raise self._not_started()
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

    async def _line(self) -> bytes:
        """Return the probe's next line. Raises PreflightError where the docker around the probe hangs."""
        if self._reach is None:
            return await self._channel.line()
        line = asyncio.ensure_future(self._channel.line())
        hang = asyncio.ensure_future(until_docker_hangs(self._reach, self.name, self.log.parent))
        try:
            await asyncio.wait((line, hang), return_when=asyncio.FIRST_COMPLETED)
            if line.done():
                return line.result()
            hang.result()
        finally:
            line.cancel()
            hang.cancel()
            await asyncio.gather(line, hang, return_exceptions=True)
        self._silent = True
        known = docker_hangs(self.name)
        error = self._error(f"docker does not answer on {self.name}: nothing comes out of its containers", known.cause)
        error.todo = known.todo
        raise error

    def _not_started(self) -> PreflightError:
        known = container_cause(self._logged(), node=self.name) if self._contained else None
        error = self._error(f"nothing can be started on {self.name}", known.cause if known is not None else None)
        if known is not None:
            error.todo = f"{known.todo}; the whole output: {self.log}"
        return error

    def _logged(self) -> str:
        try:
            return self.log.read_bytes()[self._logged_before :].decode(errors="replace")
        except OSError:
            return ""

    def _error(self, what: str, cause: str | None = None, output: str = "") -> PreflightError:
        output = output or self._logged()
        return PreflightError(
            what,
            where=f"probe@{self.name}",
            cause=cause
            or "the way there (ssh, srun, a container), or pdserve and its interpreter, which must be there "
            "under the same path as here",
            todo=f"read {self.log}; leave the node out with exclude_nodes",
            evidence=tuple(output.splitlines()[-8:]),
        )

    async def end(self) -> None:
        """Close the pipe; what does not leave then is killed, because it owns nothing."""
        self._channel.hang_up()
        try:
            async with time_limit(0.0 if self._silent else _LEAVE_SECONDS):
                await self._channel.left()
        except TimeoutError:
            await self._channel.kill()
        self._channel.close_reading()


@asynccontextmanager
async def _probes(machines: Sequence[Candidate], run_dir: Path) -> AsyncIterator[list[_Probe]]:
    probes: list[_Probe] = []
    try:
        for machine in machines:  # one that cannot be started leaves those before it to be ended
            probes.append(_Probe(machine, run_dir))
        await _all(probes, lambda probe: probe.begin())
        yield probes
    finally:
        await asyncio.gather(*(probe.end() for probe in probes))


async def survey(
    candidates: Candidates,
    recipe: Recipe,
    *,
    run_dir: Path,
    plan_for: Callable[[Sequence[Node], Versions], Plan],
    change_for: Callable[[Plan], Change] | None = None,
    fabric: Wish | None = None,
) -> Survey:
    """Gather the facts of all nodes, make the plan for them, and find what keeps it from being started.

    `change_for`: of a deployment that runs; what it goes on with is not looked at. `fabric`: also try a transfer for
    each pair of nodes. Raises PreflightError when a node cannot be looked at, or has no address that the others could
    use.
    """
    machines = candidates.machines
    async with _probes(machines, run_dir) as probes:
        asked = [_asked(machine, machines) for machine in machines]
        measured = await _all(probes, lambda probe: _facts(probe, asked, recipe))
        known = dict(zip((machine.name for machine in machines), measured, strict=True))
        facts = {name: node_facts for name, (node_facts, _) in known.items()}
        network = candidates.network or recipe.network
        locate = (lambda _: None) if candidates.file is None else candidates.file.locate
        addresses = choose_all(asked, facts, network, locate)
        nodes = [
            with_agent(
                _node(machine, facts[machine.name], addresses[machine.name]),
                run_dir=str(run_dir),
                run_id=RunDir(run_dir).run_id,
                timeouts=recipe.timeouts,
            )
            for machine in machines
        ]
        # Whether the others have the same is one of the findings.
        plan = plan_for(nodes, facts[machines[0].name].versions)
        findings = [
            *find_addresses(addresses, same_subnet=network is not None),
            *find_unnamed_network(addresses, facts, named=bool(network or any(each.configured for each in asked))),
            *compare(plan, facts, {name: skew for name, (_, skew) in known.items()}, ours=own_pdserve()),
        ]
        mark = write_mark(run_dir)
        try:
            change = None if change_for is None else change_for(plan)
            running = None if change is None else RunDir(run_dir).read_plan()
            checked = await _all(
                probes, lambda probe: probe.ask(_check(plan, probe.name, mark, change, running), Findings)
            )
            findings += [finding for answer in checked for finding in answer.findings]
        finally:
            remove_mark(run_dir, mark)
        reached = await _reach(probes, plan)
        findings += reached
        if fabric is not None:
            findings += await try_fabric({probe.name: probe for probe in probes}, plan, fabric, reached)
    return Survey(plan, tuple(findings), addresses, facts)


def _asked(candidate: Candidate, machines: Sequence[Candidate]) -> AddressQuery:
    others = tuple(machine.target for machine in machines if machine.name != candidate.name)
    return AddressQuery(candidate.name, candidate.address, candidate.key, others)


async def _facts(probe: _Probe, asked: Sequence[AddressQuery], recipe: Recipe) -> tuple[NodeFacts, Skew]:
    [others] = [each.others for each in asked if each.node == probe.name]
    sent = time.time()
    question = WhatIs(platform=recipe.platform, targets=others, python=recipe.engine.python)
    facts = (await probe.ask(question, Here)).facts
    return facts, clock_skew(facts, sent=sent, received=time.time())


def _node(candidate: Candidate, facts: NodeFacts, address: ChosenAddress) -> Node:
    return Node(
        name=candidate.name,
        address=address.address,
        devices=facts.devices_visible if candidate.devices is None else candidate.devices,
        hostname=facts.hostname,
        reach=candidate.reach,
        command=candidate.command,
    )


def _check(plan: Plan, node: str, mark: str, change: Change | None, running: Plan | None) -> Check:
    if change is None or running is None:
        return Check(plan=plan, node=node, mark=mark)
    return Check(
        plan=plan,
        node=node,
        mark=mark,
        starting=tuple(sorted(change.starting)),
        gives_back=given_back(running, node, change.replaced),
        held_by_us=tuple(sorted(change.ports[node])),
    )


async def _reach(probes: Sequence[_Probe], plan: Plan) -> list[Finding]:
    """Try whether the nodes reach each other. All nodes listen before the first connects, and until the last has."""
    targets = cross_node_ports(plan)
    if not targets:
        return []
    listening = await _all(probes, lambda probe: probe.ask(Listen(node=probe.name, targets=targets), Listens))
    taken = {(probe.name, *place) for probe, there in zip(probes, listening, strict=True) for place in there.taken}
    targets = tuple(
        target.model_copy(update={"greets": (target.node, target.address, target.port) not in taken})
        for target in targets
    )
    reached = await _all(probes, lambda probe: probe.ask(Connect(node=probe.name, targets=targets), Findings))
    return [
        *(finding for there in listening for finding in there.findings),
        *(finding for answer in reached for finding in answer.findings),
    ]


async def _all(probes: Sequence[_Probe], work: Callable[[_Probe], Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """Return what each probe answers, all at once. Raises one PreflightError with every node that does not answer."""

    def silent(errors: Sequence[PreflightError], failed: Collection[str], late: Sequence[str]) -> PreflightError:
        names = ", ".join(failed)
        return join_errors(
            errors,
            f"{len(failed)} of {len(probes)} nodes cannot be looked at: {names}",
            todo=f"read {probes[0].log.parent}/probe@*.log; leave the nodes out with exclude_nodes: [{names}]",
            also=[f"{name} had not answered either when this was given up" for name in late],
        )

    patience = max(probe.patience for probe in probes)
    return await ask_all({probe.name: work(probe) for probe in probes}, patience, silent)
