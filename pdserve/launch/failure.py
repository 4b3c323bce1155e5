"""Turns an event of an agent into an error that a person can act on: who, where, how, why, and what next."""

from __future__ import annotations

import re
import shlex
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, assert_never

from pdserve.errors import PdserveError, ServeError, StartError, StateError
from pdserve.launch.fleet import Trouble
from pdserve.lmcache_server import Attachment
from pdserve.logs.causes import Hint, explain
from pdserve.logs.lines import end_of, split
from pdserve.plan.model import Plan
from pdserve.plan.node import Local, Ssh, in_docker
from pdserve.printable import printable
from pdserve.reach.containers import docker_hangs
from pdserve.reach.link import DOCKER_HANGS
from pdserve.reach.protocol import NOT_HEARD, STOPPED, Died, Gone, Health, Late
from pdserve.run.directory import RunDir
from pdserve.run.state import DeploymentState

E = TypeVar("E", StartError, ServeError)

_TAIL_LINES = {"lmcache": 80}
_EXIT_NOISE = re.compile(r"nanobind: (leaked|this is likely)|^ - leaked (instance|type|function|\d)|resource_tracker")
"""What native extensions print when an engine ends: it fills the last screen and does not name the cause."""
_OTHER_TAIL_LINES = 30
_AGENT_TAIL_LINES = 10
_AGENT_TAIL_BYTES = 16 * 1024
_COMMAND_CHARACTERS = 300
_LATE_TODO = {
    "setup": "a command that takes long needs a larger timeouts.setup_seconds, and one that waits, another way"
}
_SETUP_CAUSE = "a command of the recipe's setup failed, so no engine was started"
_SETUP_TODO = (
    "run the command by hand on that node, inside the container where there is one, and correct it in `setup`; no "
    "shell reads it, unless it is [bash, -c, ...]"
)
_MEMORY_CAUSE = "it needed more memory than was left, by the kernel's own count for its cgroup"
_MEMORY_TODO = (
    "raise the limit (MemoryMax= of its unit, --mem of the job, --memory of the container), or ask for less memory "
    "(VLLM_CPU_KVCACHE_SPACE, lmcache.l1_size_gb, fewer instances on this host)"
)


def start_error(trouble: Trouble, plan: Plan, run: RunDir, *, served: bool = False) -> StartError:
    """The error of a start that `trouble` ended. `served`: that of a process that served while others were started."""
    error: StartError = _error(StartError, trouble, plan, run, "while serving" if served else "while starting")
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
    lines = [line for line in trouble.log_tail if not _EXIT_NOISE.search(line)]
    tail: tuple[str, ...] = tuple(lines[-_TAIL_LINES.get(process.role, _OTHER_TAIL_LINES) :])
    evidence = (f"command: {command}", f"log: {log}", *tail)
    if isinstance(trouble, Late):
        hint = explain(trouble.log_tail, exit_code=None, role=process.role)
        answer = f"last answer of its probe: {trouble.last_answer}"
        saved = (
            f"stacks, children and sockets could not be saved in {run.diagnostics}"
            if trouble.diagnostics is None
            else f"stacks, children and sockets are in {run.path / trouble.diagnostics}"
        )
        return kind(
            f"{process.role} is alive but not ready after {trouble.seconds:.0f} s (its limit)",
            where=where,
            cause=f"{hint.cause}; {answer}" if hint else answer,
            todo=f"{hint.todo if hint else _LATE_TODO.get(process.role, 'a slow host needs timeouts.*')}; {saved}",
            evidence=evidence,
        )
    if isinstance(trouble, Died):
        return _death_error(kind, trouble, where, process.role, when, evidence)
    assert_never(trouble)


def _node_lost(kind: type[E], gone: Gone, plan: Plan, run: RunDir, when: str) -> E:
    log: Path = run.logs / f"agent@{gone.node}.log"
    there = ", ".join(process.name for process in plan.processes if process.node == gone.node)
    tail: tuple[str, ...] = _tail(log)
    ended = container_end(gone.exit_code, tail[-1] if tail else "")
    todo = f"read {log}"
    if gone.because == "lease":
        todo = (
            "what holds the launcher must not do so, or timeouts.agent_lease_seconds must be longer; pdserve up again"
        )
    elif gone.how == DOCKER_HANGS:
        todo = docker_hangs(gone.node).todo
    elif ended is not None:
        todo += f"; {ended.todo}"
    elif isinstance(plan.node(gone.node).reach, Ssh):  # Slurm ends what a step leaves
        todo += f"; `pdserve down {plan.name}`, typed on {gone.node}, clears up what an agent that was killed has left"
    if gone.how.startswith(NOT_HEARD):
        todo += "; a node that is only busy needs a longer timeouts.heartbeat_seconds (and agent_lease_seconds)"
    cause = _why_lost(gone, plan, ended)
    if gone.because is None and tail and tail[-1].startswith(STOPPED):
        cause = f"{tail[-1]} (kill -STOP, a debugger): it acts again once it is continued or killed"
    return kind(
        f"node {gone.node} is lost {when}, and with it {there}: {gone.how}",
        where=f"agent@{gone.node}",
        cause=cause,
        todo=todo,
        evidence=(f"log: {log}", *tail),
    )


def _why_lost(gone: Gone, plan: Plan, ended: Hint | None) -> str:
    """`ended`: why the container of its agent has ended, where docker says so."""
    lease = plan.timeouts.agent_lease_seconds
    match gone.because:
        case "lease" if gone.held > lease / 2:
            return (
                f"the launcher itself stood still for {gone.held:.0f} s: it was stopped (SIGSTOP, a debugger), or its "
                f"machine or disk was; an agent stops what runs there after {lease:g} s without a word from here"
            )
        case "lease":
            return (
                "orders of the launcher do not arrive there, although events of the agent arrive here: the network, or "
                "the srun or ssh in between"
            )
        case "signal" if in_docker(plan.node(gone.node)):
            return (
                "its container was stopped (docker stop, the stop of docker or of the machine); it stops what it owned"
            )
        case "signal":
            return "it was ended there, or what it ran in was (a session, a container); it stops what it owned"
        case "killed":
            return (
                "it was killed there, or the kernel killed it because the machine is out of memory (dmesg shows it); "
                "its guard stops what it owned"
            )
    if gone.how == DOCKER_HANGS:
        return docker_hangs(gone.node).cause
    if ended is not None:
        return ended.cause
    near, docker = isinstance(plan.node(gone.node).reach, Local), in_docker(plan.node(gone.node))
    if near and not docker:
        return "it was killed, or the machine is out of memory; its guard stops what it owned"
    way = (
        "docker or its container was" if near else "the node, its network, or the srun or ssh that holds the agent went"
    )
    agent = "the agent, its container or docker" if docker else "the agent"
    how = "stopped, paused or killed" if near else f"away, or {agent} was stopped or killed"
    stops = f"an agent that lives stops what runs there, at the latest after {lease:g} s without a word from here"
    return f"{way} {how}; {stops}"


def not_reached(state: DeploymentState, plan: Plan) -> dict[str, str]:
    """Node -> what a user must know of it after a stop that did not reach it, because it had been lost."""
    notified: dict[str, str] = {}
    reaches = {node.name: node.reach for node in plan.nodes}
    for name, known in state.nodes.items():
        reach = reaches.get(name, Local())
        if not known.lost or isinstance(reach, Local):
            continue
        left = f"`pdserve down {plan.name}`, typed there, clears up" if isinstance(reach, Ssh) else "Slurm ends"
        notified[name] = (
            f"{name} was not reached ({known.lost}): its agent, if it lives, stops what runs there by itself, at the "
            f"latest {plan.timeouts.agent_lease_seconds:g} s after it last heard from here; {left} what else is left"
        )
    return notified


def _tail(log: Path) -> tuple[str, ...]:
    """The last lines of a log that is written here; none where it is missing."""
    return tuple(line for line in split(end_of(log, _AGENT_TAIL_BYTES)) if line.strip())[-_AGENT_TAIL_LINES:]


def _death_error(kind: type[E], died: Died, where: str, role: str, when: str, evidence: tuple[str, ...]) -> E:
    subject = f"{role} (PID {died.pid})" if died.member is None else f"{died.member} (PID {died.pid}) of {role}"
    after = f"{subject} {died.how} after {died.seconds:.1f} s, {when}"
    if died.out_of_memory:
        return kind(after, where=where, cause=_MEMORY_CAUSE, todo=_MEMORY_TODO, evidence=evidence)
    hint = explain(died.log_tail, exit_code=died.code, role=role)
    if role == "setup" and hint is None:
        return kind(after, where=where, cause=_SETUP_CAUSE, todo=_SETUP_TODO, evidence=evidence)
    return kind(
        after,
        where=where,
        cause=hint.cause if hint else None,
        todo=hint.todo if hint else "read the log below; nothing in it is a cause that pdserve knows",
        evidence=evidence,
    )


def interrupted_restart(name: str) -> StateError:
    """The error of a restart whose recovery was cancelled."""
    return StateError(
        f"the restart of {name} was interrupted",
        where=name,
        cause="a pdserve up or down, the loss of its node, or another death of it came in between",
        todo="pdserve status shows what runs; pdserve up starts what does not",
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


_LOOK = "docker events --since 10m, dmesg and journalctl -u docker have who ended it"
_DAEMON = Hint(
    "docker itself failed: its daemon was stopped or killed, or lost the container; the agent sees its pipe close and "
    "stops what runs there",
    "systemctl status docker and journalctl -u docker have why; start it, then pdserve up again",
)
_KILLED = Hint(
    "everything in the container was killed at once: docker kill, a docker stop whose time was over, the death of its "
    "first process or of the guard, or its memory limit",
    f"{_LOOK}; a stop by hand is `pdserve down`, which drains first",
)
_TERMINATED = Hint(
    "the container was stopped from outside: docker stop, or the stop of docker or of the machine",
    f"{_LOOK}; a stop by hand is `pdserve down`, which drains first",
)
_CANNOT_RUN = Hint(
    "the program of the container cannot be run in this image",
    "correct container.python or container.image; docker's own words are below",
)
_BY_CODE = {
    125: _DAEMON,
    126: _CANNOT_RUN,
    127: _CANNOT_RUN,
    128 + signal.SIGKILL: _KILLED,
    128 + signal.SIGTERM: _TERMINATED,
}

_CONNECTION_BROKE = re.compile(
    r'(?:time="[^"]*" level=error msg="|ERRO\[\d+\] )error waiting for container: '
    r"|(?:read|write) (?:unix|tcp) \S+: (?:read|write): "
)
"""What `docker run` prints when its daemon goes. Its exit code is 125 where it sees the end of the answer first, and 1
where it sees that of the stream: a daemon that dies with input of the container unread (docker 20.10)."""


def container_end(exit_code: int | None, last_line: str = "") -> Hint | None:
    """`last_line`: of its log; those before may be of an earlier `docker run`. None: neither has a meaning of docker's
    own."""
    if exit_code == 1 and _CONNECTION_BROKE.match(last_line):
        return _DAEMON
    return None if exit_code is None else _BY_CODE.get(exit_code)


_LAST_EVENTS = 40
_LEFT_OUT = ("at", "event", "error", "patches", "processes")


def failure_markdown(
    error: PdserveError, name: str, state: DeploymentState | None, events: Sequence[Mapping[str, Any]]
) -> str:
    """Return failure.md: the error, the processes, the last events. `state` None: it failed before anything started."""
    return printable("\n".join(_lines(error, name, state, events))) + "\n"


def _lines(
    error: PdserveError, name: str, state: DeploymentState | None, events: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    yield f"# {name} failed"
    yield ""
    yield f"**{error.what}**"
    yield ""
    yield from (
        f"- {title}: {text}"
        for title, text in (("where", error.where), ("likely cause", error.cause), ("what to do", error.todo))
        if text
    )
    yield f"- when: {time.strftime('%Y-%m-%d %H:%M:%S %z')}; exit code {error.exit_code}"
    if error.evidence:
        yield from ("", "## Evidence", "")
        yield from (f"    {line}" for line in error.evidence)
    if state is not None and state.processes:
        yield from ("", "## Processes", "", "| process | node | state | why |", "| --- | --- | --- | --- |")
        for process, status in state.processes.items():
            yield f"| {process} | {status.node} | {status.phase} | {status.note.replace('|', '/')} |"
    if events:
        yield from (
            "",
            f"## The last of what happened (the rest: events.jsonl, events.jsonl.1; {len(events)} lines)",
            "",
        )
        began = events[0]["at"] if state is None else state.started_at
        for event in events[-_LAST_EVENTS:]:
            fields = " ".join(f"{key}={value}" for key, value in event.items() if key not in _LEFT_OUT)
            yield f"    {event['at'] - began:8.3f} s  {event['event']:<12} {fields}"[:300]
