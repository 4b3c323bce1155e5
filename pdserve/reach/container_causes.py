"""Why nothing came out of a container, by the last words of docker and of the interpreter inside.

The wordings are those of docker 20.10 to 28, podman 4.3 and CPython; each was taken from a run (tests/containers).
"""

from __future__ import annotations

import re

from pdserve.logs.causes import Hint


def _rule(pattern: str, cause: str, todo: str) -> tuple[re.Pattern[str], str, str]:
    return re.compile(pattern, re.MULTILINE), cause, todo


_LIMITS_TODO = (
    "raise the limits of the docker daemon there, or name what it may give: container.options: "
    "[--ulimit=nofile=N:N, --ulimit=memlock=BYTES:BYTES]; podman also needs --ulimit=nproc=N:N, and `default_ulimits = "
    "[]` in its containers.conf"
)

_RULES = (
    _rule(
        r"permission denied while trying to connect to the Docker daemon socket",
        "this user may not use the socket of docker there",
        "have an administrator run `usermod -aG docker USER` there, and log in again; with the permission to use the "
        "socket comes root on that node",
    ),
    _rule(
        r"Cannot connect to the Docker daemon at (?P<socket>\S+?)\.? Is the docker daemon running",
        "no docker daemon answers at {socket}",
        "start it there (systemctl start docker), or let DOCKER_HOST name its socket",
    ),
    _rule(
        r"(?:docker: command not found|docker: not found|exec: \"?docker\"?: executable file not found)",
        "there is no docker on that node",
        "install docker there, or use container.kind: apptainer or pyxis",
    ),
    _rule(
        r"Unable to find image '(?P<name>[^']+)' locally\n(?:.*\n)*?.*(?:pull access denied|manifest .*not found|"
        r"manifest unknown)",
        "the image {name} is not on that node, and its registry has none of that name for this user",
        "correct container.image; for a private registry: docker login there; for one that was built by hand: "
        "docker load there",
    ),
    _rule(
        r"Unable to find image '(?P<name>[^']+)' locally\n(?:.*\n)*?.*Error response from daemon: (?P<why>.+)",
        "the image {name} is not on that node, and it could not be pulled: {why}",
        "docker pull {name} there shows the same; without a way to the registry bring it by docker save and docker "
        "load",
    ),
    _rule(
        r"error setting rlimit type (?P<number>\d+): operation not permitted",
        "docker there may not raise a limit of its containers (setrlimit, number {number}; 6: processes, 7: open "
        "files, 8: locked memory): it is rootless, or runs in a container itself",
        _LIMITS_TODO,
    ),
    _rule(
        r"setrlimit `(?P<limit>RLIMIT_\w+)`: Operation not permitted",
        "podman there may not raise a limit of its containers ({limit}): it is rootless, or runs in a container itself",
        _LIMITS_TODO,
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
        r"no space left on device",
        "a disk of that node is full",
        "docker system df and df -h there show what fills it; docker image prune removes unused images",
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
        "container.image must have a shell's basic programs (env) and an interpreter: container.python",
    ),
    _rule(
        r"exec: \"(?P<program>[^\"]+)\": (?:executable file not found|stat .*: no such file)",
        "the image has no {program}",
        "container.image must have a shell's basic programs (env) and an interpreter: container.python",
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


def container_cause(output: str) -> Hint | None:
    """The most specific known cause in what was printed; None: nothing is recognized."""
    for pattern, cause, todo in _RULES:
        if (match := pattern.search(output)) is not None:
            groups = {name: value or "" for name, value in match.groupdict().items()}
            return Hint(cause.format_map(groups), todo.format_map(groups))
    return None
