"""Docker on a node: a tool that is run there, a daemon that hangs, what its words mean, containers that were left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pdserve.errors import PreflightError
from pdserve.logs.causes import Hint
from pdserve.plan.container import docker_list_argv, docker_stop_argv, docker_version_argv
from pdserve.plan.node import Node, Reach, Srun, in_docker, reach_argv
from pdserve.reach.slurm import srun_environment
from pdserve.system.process import Output, output_of, spawn
from pdserve.time_limit import time_limit

_LOOK_SECONDS = 1.0
_END_SECONDS = 5.0
_OUTPUT_BYTES = 1 << 20

_FIRST_SECONDS = 5.0
"""A container that comes at once needs no question."""
_EVERY_SECONDS = 10.0
_ANSWER_SECONDS = 20
"""A healthy daemon answers within one, also while it unpacks an image."""
_WAY_SECONDS = 60.0
"""For a login or a step of Slurm around it."""
_TOO_LATE = 124
"""With which timeout(1) ends when its time is over. It runs on the node: a slow way there is no fault of docker."""

_LIST_SECONDS = 20.0
_STOP_SECONDS = 30.0
_WHY_CHARACTERS = 200


def _beside(reach: Reach, node: str, step: str, argv: Sequence[str]) -> tuple[list[str], Mapping[str, str]]:
    """Return what runs a tool on a node beside any container of ours, and its environment."""
    if not isinstance(reach, Srun):
        return list(reach_argv(reach, node, step, argv)), os.environ
    # With pyxis's options the step would be inside the container.
    bare = reach.model_copy(update={"options": ()})
    return list(reach_argv(bare, node, step, argv)), srun_environment(os.environ)


class ToolEnd(NamedTuple):
    """Holds how a tool ended. `code` None: it took longer than it was given. `text`: stdout and stderr."""

    code: int | None
    text: str


async def run_tool(
    reach: Reach,
    node: str,
    argv: Sequence[str],
    *,
    log: Path,
    marker: str,
    seconds: float,
    watch: Callable[[str], None] | None = None,
) -> ToolEnd:
    """Run a tool of a node (docker, df, ...) to its end.

    Its output is in `log`; `watch` gets all of it, again and again while the tool runs. A tool that is given up, or
    whose caller is, is stopped here. Raises OSError when the way there (ssh, srun), or here the tool, cannot be run."""
    whole, environ = _beside(reach, node, f"image-{node}", argv)
    begin = _size(log)
    child = spawn(whole, env=environ, log=log, marker=marker, control_stdin=False)
    try:
        async with time_limit(seconds):
            while (ended := child.poll()) is None:
                try:
                    # Not wait_for, which Python 3.11 lets go on when it is cancelled at the moment at which it ends.
                    async with time_limit(_LOOK_SECONDS):
                        ended = await child.wait()
                    break
                except TimeoutError:
                    if watch is not None:
                        watch(_text(log, begin))
    except TimeoutError:
        return ToolEnd(None, _text(log, begin))
    finally:
        if child.poll() is None:
            await child.stop(_END_SECONDS)
    return ToolEnd(ended.code, _text(log, begin))


def _size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def _text(log: Path, begin: int) -> str:
    with log.open("rb") as file:
        file.seek(max(begin, _size(log) - _OUTPUT_BYTES))
        return file.read().decode(errors="replace")


def cannot_run_error(program: str, error: OSError, *, where: str) -> PreflightError:
    """Return what a way to a node that cannot be run here means.

    Popen names the program in its error; another file is the log."""
    if error.filename not in (None, program):
        return PreflightError(f"{error.filename} cannot be written: {error.strerror}", where=where)
    return PreflightError(
        f"{program} cannot be run here: {error.strerror}",
        where=where,
        cause=f"no {program} in a folder of PATH on this machine" if isinstance(error, FileNotFoundError) else None,
        todo=f"install {program} on the machine where pdserve is called, or add its folder to PATH",
    )


async def until_docker_hangs(reach: Reach, node: str, logs: Path) -> None:
    """Return at the latest 35 s after the daemon of a node has stopped answering, else never.

    It is for racing with what is awaited from a container: where its socket accepts and nothing is answered, a `docker
    run` waits for ever, without a word. A container that is only slow to come looks the same; the daemon itself answers
    `docker version` at once then. What cannot be asked (no permission, no way there) is no hang. `logs`: the folder of
    the output."""
    await asyncio.sleep(_FIRST_SECONDS)
    while True:
        with contextlib.suppress(OSError):  # no way there can be run here, which is found elsewhere
            ended = await run_tool(
                reach,
                node,
                docker_version_argv(_ANSWER_SECONDS),
                log=logs / f"docker@{node}.log",
                marker=f"{logs.parent.name}/docker@{node}",
                seconds=_ANSWER_SECONDS + _WAY_SECONDS,
            )
            if ended.code == _TOO_LATE:
                return
        await asyncio.sleep(_EVERY_SECONDS)


def docker_hangs(node: str, seconds: float = _ANSWER_SECONDS, *, or_way: bool = False) -> Hint:
    """Say why and what to do; `or_way`: it could be the way there as well."""
    return Hint(
        f"no answer of docker within {seconds:g} s: dockerd there hangs (it was stopped, or waits for its disk)"
        + (", or the way there (ssh, srun) does" if or_way else ""),
        f"`docker info` on {node} must answer; journalctl -u docker has why it does not, and sudo systemctl restart "
        "docker ends the hang, with every container there",
    )


Rule = tuple[re.Pattern[str], Hint]
"""A pattern, and the cause and fix of what it is found in. What stands in braces is filled in: the node, the program,
and groups of the pattern."""


def _rule(pattern: str, cause: str, todo: str) -> Rule:
    return re.compile(pattern, re.IGNORECASE | re.MULTILINE), Hint(cause, todo)


_LIMITS_FIX = (
    "raise the limits of the docker daemon there, or name what it may give: container.options: "
    "[--ulimit=nofile=N:N, --ulimit=memlock=BYTES:BYTES]; podman also needs --ulimit=nproc=N:N, and `default_ulimits = "
    "[]` in its containers.conf"
)
_PROGRAMS_FIX = "container.image must have a shell's basic programs (env) and an interpreter: container.python"

# The wordings are those of docker 20.10 to 28, podman 4.3 and CPython; each was taken from a run (tests/containers).
_RULES: tuple[Rule, ...] = (
    _rule(
        r"permission denied while trying to connect|dial unix \S+ connect: permission denied",
        "this user may not use the socket of docker there: it takes membership in the group docker",
        "on {node}: sudo usermod -aG docker USER, then log in anew (`id` shows the group; with it comes root there); "
        "where only `sudo docker` works pdserve cannot use docker, because it could not stop what sudo started: use "
        "apptainer",
    ),
    _rule(
        r"Cannot connect to the Docker daemon at (?P<socket>\S+?)\.?\s",
        "no docker daemon answers at {socket}: dockerd does not run there, or DOCKER_HOST names another socket",
        "on {node}: sudo systemctl start docker; `docker info` must answer",
    ),
    _rule(
        r"no space left on device|Disk quota exceeded",
        "a disk of {node} is full: the layers of an image are kept beside what is unpacked from them",
        "make room on {node} (docker system df, docker image prune; apptainer unpacks in APPTAINER_TMPDIR, enroot in "
        "ENROOT_TEMP_PATH)",
    ),
    _rule(
        r"docker: (?:command )?not found|exec: \"?docker\"?: executable file not found"
        r"|execve\(\): docker: No such file",
        "there is no docker in the PATH of a login on {node}",
        "install docker there, or set another container.kind",
    ),
    _rule(
        r"error setting rlimit type (?P<number>\d+): operation not permitted",
        "docker there may not raise a limit of its containers (setrlimit, number {number}; 6: processes, 7: open "
        "files, 8: locked memory): it is rootless, or runs in a container itself",
        _LIMITS_FIX,
    ),
    _rule(
        r"setrlimit `(?P<limit>RLIMIT_\w+)`: Operation not permitted",
        "podman there may not raise a limit of its containers ({limit}): it is rootless, or runs in a container itself",
        _LIMITS_FIX,
    ),
    _rule(
        r"crun: cgroups in hybrid mode not supported",
        "crun, the runtime of podman there, takes cgroups of version 1 or 2, and that node has both",
        'name another runtime in containers.conf there ([engine] runtime = "runc"), or start it with '
        "systemd.unified_cgroup_hierarchy=1",
    ),
    _rule(
        r"container-init binary not found",
        "podman there has no program for --init, which removes ended processes of the container",
        "install the package catatonit there",
    ),
    _rule(
        r"could not select device driver|nvidia-container-cli: (?P<why>.+)",
        "docker there cannot give the container its GPUs",
        "install the NVIDIA Container Toolkit there, then: docker run --rm --gpus=all IMAGE nvidia-smi",
    ),
    _rule(
        r"error gathering device information while adding custom device \"(?P<device>[^\"]+)\"",
        "the node has no device {device}, or docker may not give it away",
        "ls -l {device} there; remove it from container.options, or load its driver",
    ),
    _rule(
        r"^env: ['‘]?(?P<python>[^'’:]+)['’]?: No such file or directory",
        "the image has no {python}",
        "let container.python name an interpreter of the image that has vLLM and pdserve's dependencies",
    ),
    _rule(
        r"\[FATAL tini \(\d+\)\] exec (?P<program>\S+) failed: No such file",
        "the image has no {program}",
        _PROGRAMS_FIX,
    ),
    _rule(
        r"exec: \"(?P<program>[^\"]+)\": (?:executable file not found|stat .*: no such file)",
        "the image has no {program}",
        _PROGRAMS_FIX,
    ),
    _rule(
        r"No module named '?pdserve'?",
        "the interpreter of the image has no pdserve",
        "install pdserve in the image, the same version as here; of a source tree the folder is mounted by itself",
    ),
    _rule(
        r"ModuleNotFoundError: No module named '(?P<module>[^']+)'",
        "the interpreter of the image lacks {module}, which pdserve needs",
        "let container.python name the one that has vLLM; where that lacks it: pip install {module} in the image",
    ),
)
_OF_IMAGES: tuple[Rule, ...] = (
    _rule(
        r"toomanyrequests|rate limit",
        "the registry gives out no more to this address for now",
        "log in there (docker login), or take a mirror: set container.image",
    ),
    _rule(
        r"no matching manifest for|does not match the (?:specified|detected) (?:host )?platform",
        "the image is of another processor architecture",
        "set container.image to one for that node's",
    ),
    _rule(
        r"manifest unknown|not found: manifest|manifest for \S+ not found|repository does not exist"
        r"|pull access denied|requested access to the resource is denied|unauthorized|authentication required"
        r"|name unknown|invalid reference format|invalid repository name|\b40[134]\b",
        "the registry has no such image, or gives it only to those who have logged in",
        "correct container.image; for a private one log in on {node} (docker login, apptainer registry "
        "login, enroot's .credentials)",
    ),
    _rule(
        r"dial tcp|no such host|i/o timeout|TLS handshake|connection refused|network is unreachable"
        r"|name resolution|Could not resolve|Client\.Timeout|proxyconnect|x509|connection reset",
        "the registry cannot be reached from there",
        "look at the node's network, and at the proxy of dockerd, apptainer or enroot; or carry it over: docker save "
        "on a machine that reaches it, docker load on {node}, or a .sif or .sqsh file as container.image",
    ),
    _rule(
        r"executable file not found|command not found|: not found|No such file or directory",
        "there is no {program} in the PATH of a login on {node}",
        "install {program} there, or set another container.kind",
    ),
)
_ABSENT = re.compile(r"No such (?:image|object)|image not known", re.IGNORECASE)  # docker, podman


def container_cause(output: str, *, node: str, program: str = "docker", fetching: bool = False) -> Hint | None:
    """Return the most specific known cause why nothing came out of a container, or out of a program that fetches or
    looks for its image (`fetching`); None: nothing is recognized."""
    for pattern, hint in (*_RULES, *(_OF_IMAGES if fetching else ())):
        if (match := pattern.search(output)) is not None:
            words = {"node": node, "program": program}
            words |= {name: value or "" for name, value in match.groupdict().items() if name != "program" or value}
            return Hint(hint.cause.format_map(words), hint.todo.format_map(words))
    return None


def is_absent(text: str) -> bool:
    """Tell whether docker works, and has no such image yet."""
    return bool(_ABSENT.search(text))


@dataclass(frozen=True)
class LeftContainers:
    """Containers of a run that ran when they were looked for."""

    names: tuple[str, ...] = ()
    """`ID on NODE`."""
    unknown: tuple[str, ...] = ()
    """`NODE (why)` of each node whose docker could not be asked, or did not stop them: containers may run there."""


async def stop_left_containers(nodes: Iterable[Node], run_id: str) -> LeftContainers:
    """Stop the containers that were left on every node whose agent was in docker, by our label, never by name or image;
    return which they were.

    A `docker run` that is killed leaves its container alone; the agent in it sees its pipe close and leaves by itself.
    This is for what did not.
    """
    return await _on_each(nodes, run_id, stop=True)


async def left_containers(nodes: Iterable[Node], run_id: str) -> LeftContainers:
    """Look for containers that were left, and stop nothing."""
    return await _on_each(nodes, run_id, stop=False)


async def _on_each(nodes: Iterable[Node], run_id: str, *, stop: bool) -> LeftContainers:
    there = [node for node in nodes if in_docker(node)]
    seen = await asyncio.gather(*(asyncio.to_thread(_on, node, run_id, stop=stop) for node in there))
    return LeftContainers(
        tuple(name for there in seen for name in there.names), tuple(name for there in seen for name in there.unknown)
    )


def _on(node: Node, run_id: str, *, stop: bool) -> LeftContainers:
    listed = _run(node, docker_list_argv(run_id, node.name), _LIST_SECONDS)
    if listed.code != 0:
        return LeftContainers(unknown=(_unknown(node, listed),))
    ids = listed.out.split()
    names = tuple(f"{container[:12]} on {node.name}" for container in ids)
    if ids and stop:
        stopped = _run(node, docker_stop_argv(ids, _STOP_SECONDS), 2 * _STOP_SECONDS)
        # One that has ended and removed itself meanwhile is an error of `docker stop`.
        if stopped.code != 0 and (left := _run(node, docker_list_argv(run_id, node.name), _LIST_SECONDS)).out.strip():
            return LeftContainers(names, (_unknown(node, stopped if left.code == 0 else left),))
    return LeftContainers(names)


def _unknown(node: Node, tool: Output) -> str:
    why = (tool.err.strip().splitlines() or [f"exit code {tool.code}"])[-1]
    return f"{node.name} ({why[:_WHY_CHARACTERS]})"


def run_in_container(node: Node, arguments: Sequence[str], seconds: float) -> Output:
    """Run `python ARGUMENTS` to its end in a container like that of the node's agent, which sees all processes of the
    node. Never raises for what comes of it."""
    program, verb, *rest = node.command
    return _run(node, (program, verb, "--pid=host", *rest, *arguments), seconds)


def _run(node: Node, argv: Sequence[str], seconds: float) -> Output:
    whole, environ = _beside(node.reach, node.name, f"containers-{node.name}", argv)
    return output_of(whole, timeout=seconds, environ=environ)
