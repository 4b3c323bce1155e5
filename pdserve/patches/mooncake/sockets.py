"""Sockets and file descriptors of a Mooncake worker: how many it may have, and what happens when none are left."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
from pathlib import Path
from typing import Any

from pdserve.patches import effects

OUT_OF_SOCKETS = "out-of-sockets"
"""The effect under which each patch counts it. The proxy and the agent look for this name."""
HELP = "times that a worker had no socket or file descriptor left (a look every second, and each pull that failed)"

_DESCRIPTORS = 131_072
"""Enough for all sockets of a context. A hard limit can be a thousand million, and some libraries count up to it."""
_SOCKETS_A_PULL = 3
"""A DEALER, and both ends of its monitor."""
_DESCRIPTORS_A_PULL = 4
"""One for each socket, and its TCP connection."""
_SOCKETS_KEPT = 64
"""For withdrawals, whatever the pulls take: three a prefill worker."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE)
_LOOK_SECONDS = 1.0

log = logging.getLogger("pdserve.patches")


def is_exhaustion(error: BaseException) -> bool:
    """Tell whether a ZMQError or an OSError means that there is no socket or descriptor left."""
    return getattr(error, "errno", None) in _EXHAUSTED


def widen(context: Any) -> None:
    """Raise the limits of sockets and descriptors as far as they go. This comes before the context's first socket: from
    then on libzmq keeps to the 1,023 of its default."""
    import zmq

    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def pulls_at_once(context: Any) -> int:
    """Return how many pulls may have sockets. A quarter of the free descriptors is left to whatever else opens."""
    import zmq

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    free = (limit - sum(1 for _ in Path("/proc/self/fd").iterdir())) * 3 // 4
    sockets = context.get(zmq.MAX_SOCKETS) - _SOCKETS_KEPT
    return max(1, min(int(sockets) // _SOCKETS_A_PULL, free // _DESCRIPTORS_A_PULL))


def need_a_descriptor() -> None:
    """Check that a descriptor is free. Raises OSError where none is: libzmq makes a connection later, and would try in
    silence again and again."""
    os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def count(patch: str, error: BaseException) -> None:
    """Make the exhaustion known: on /metrics, to the proxy and to the deployment."""
    effects.count(patch, OUT_OF_SOCKETS)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    log.error("this worker has no sockets left (%s; its limit of file descriptors is %s): raise ulimit -n", error, soft)


async def look_out(patch: str) -> None:
    """Count every second in which the process has no descriptor left: libzmq does not report that it cannot accept."""
    while True:
        try:
            need_a_descriptor()
        except OSError as error:
            if is_exhaustion(error):
                count(patch, error)
        await asyncio.sleep(_LOOK_SECONDS)
