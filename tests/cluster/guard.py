"""Keeps the test process from addressing nodes from the machine's own network, where their addresses are strangers'."""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import Any

from tests.cluster.errors import LabError
from tests.cluster.spec import NETWORK


@cache
def guard_host_network() -> None:
    """From now on Python's sockets cannot connect to a node unless their thread is in a node's network."""
    own = _network()

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("socket.connect", "socket.sendto"):
            return
        target = arguments[-1]
        if isinstance(target, tuple) and str(target[0]).startswith(NETWORK) and _network() == own:
            raise LabError(f"{target[0]} is a node: connect from inside, with connect, http, get or inside")

    sys.addaudithook(look)


def _network() -> str:
    return os.readlink("/proc/thread-self/ns/net")  # noqa: PTH115  (net:[n] is no path)
