"""From an event of an agent to an error that a person can act on: who, where, how, why, and what next."""

from __future__ import annotations

import re
import shlex
from typing import TypeVar

from pdserve.errors import ServeError, StartError
from pdserve.fleet import Trouble
from pdserve.hints import explain
from pdserve.lmcache_server import Attachment
from pdserve.plan.model import Plan
from pdserve.plan.reach import Local, Ssh
from pdserve.protocol import Died, Gone, Health, Late
from pdserve.rundir import RunDir

E = TypeVar("E", StartError, ServeError)

_TAIL_LINES = {"lmcache": 80}
_EXIT_NOISE = re.compile(r"nanobind: (leaked|this is likely)|^ - leaked (instance|type|function|\d)|resource_tracker")
"""What native extensions print when an engine ends: it fills the last screen and says nothing of the cause."""
_OTHER_TAIL_LINES = 30
_COMMAND_CHARACTERS = 300


def start_error(trouble: Trouble, plan: Plan, run: RunDir) -> StartError:
    """The error of a start that `trouble` ended."""
    error: StartError = _error(StartError, trouble, plan, run, "while starting")
    return error


def serve_error(trouble: Trouble, plan: Plan, run: RunDir) -> ServeError:
    """The error of a deployment that cannot serve on after `trouble`."""
    error: ServeError = _error(ServeError, trouble, plan, run, "while serving")
    return error


def _error(kind: type[E], trouble: Trouble, plan: Plan, run: RunDir, when: str) -> E:
    if isinstance(trouble, Gone):
        return _node_lost(kind, trouble, plan, run, when)
    process = plan.process(trouble.name)
    where = f"{process.name}@{process.node}"
    log = run.path / process.log
    command = shlex.join(process.argv)
    if len(command) > _COMMAND_CHARACTERS:
        command = command[:_COMMAND_CHARACTERS] + f"... (all of it: {run.plan})"
    if isinstance(trouble, Health):
        return kind(f"{process.role} does not answer {when}: {trouble.why}", where=where, todo=f"read {log}")
    said = [line for line in trouble.log_tail if not _EXIT_NOISE.search(line)]
    tail: tuple[str, ...] = tuple(said[-_TAIL_LINES.get(process.role, _OTHER_TAIL_LINES) :])
    evidence = (f"command: {command}", f"log: {log}", *tail)
    if isinstance(trouble, Late):
        hint = explain(trouble.log_tail, exit_code=None, role=process.role)
        answer = f"last answer of its probe: {trouble.last_answer}"
        return kind(
            f"{process.role} is alive but not ready after {trouble.seconds:.0f} s (its limit)",
            where=where,
            cause=f"{hint.cause}; {answer}" if hint else answer,
            todo=f"{hint.todo if hint else 'a slow host needs timeouts.*'}; "
            f"stacks, children and sockets are in {run.path / trouble.diagnostics}",
            evidence=evidence,
        )
    return _died(kind, trouble, where, process.role, when, evidence)


def _node_lost(kind: type[E], gone: Gone, plan: Plan, run: RunDir, when: str) -> E:
    cause = "it was killed, or the machine is out of memory; its guard stops what it owned"
    if not isinstance(plan.node(gone.node).reach, Local):
        lease = plan.timeouts.agent_lease_seconds
        cause = (
            "the node, its network, or the srun or ssh that holds the agent went away, or the agent was killed; an "
            f"agent that lives stops what runs there, at the latest after {lease:g} s without a word from here"
        )
    there = ", ".join(process.name for process in plan.processes if process.node == gone.node)
    todo = f"read {run.logs / f'agent@{gone.node}.log'}"
    if isinstance(plan.node(gone.node).reach, Ssh):  # Slurm ends what a step leaves
        todo += f"; `pdserve down {plan.name}`, typed on {gone.node}, clears up what an agent that was killed has left"
    return kind(
        f"node {gone.node} is lost {when}, and with it {there}: {gone.how}",
        where=f"agent@{gone.node}",
        cause=cause,
        todo=todo,
    )


def _died(kind: type[E], died: Died, where: str, role: str, when: str, evidence: tuple[str, ...]) -> E:
    subject = f"{role} (PID {died.pid})" if died.member is None else f"{died.member} (PID {died.pid}) of {role}"
    hint = explain(died.log_tail, exit_code=died.code, role=role)
    return kind(
        f"{subject} {died.how} after {died.seconds:.1f} s, {when}",
        where=where,
        cause=hint.cause if hint else None,
        todo=hint.todo if hint else "read the log below; nothing in it is a cause that pdserve knows",
        evidence=evidence,
    )


def not_attached(missing: list[Attachment], plan: Plan, run: RunDir) -> StartError:
    """Engines are healthy, but LMCache does not know them: they would serve without the cache, silently."""
    first = missing[0]
    server = next(server for server in plan.lmcache if server.process == first.server)
    seen = "its /status did not answer" if first.registered is None else f"{first.registered} are registered"
    return StartError(
        f"{first.expected} engine worker(s) should be registered at {first.server}, {seen}",
        where=f"{first.server}@{plan.process(first.server).node}",
        cause="the engines do not use this server (another port, a connector without lmcache-mp) or gave up on it",
        todo=f"compare lmcache.* in {run.recipe} with the logs of {', '.join(server.engines)}",
    )
