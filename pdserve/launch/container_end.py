"""Why a container of docker has ended, by the exit code and the last words of the `docker run` that held its agent."""

from __future__ import annotations

import re
import signal

from pdserve.logs.causes import Hint

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
