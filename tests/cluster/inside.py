"""Code of the test process in a node's network: HTTP without a process of its own for each request."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from tests.cluster import kernel

Result = TypeVar("Result")


def in_network(init: int, work: Callable[[], Result]) -> Result:
    """Runs `work` in a thread that has gone into the network of a node; returns or raises what it does.

    Only the network is the node's: names are not looked up in its /etc/hosts, so use addresses.
    """

    def go() -> Result:
        kernel.enter(Path(f"/proc/{init}/ns/net"), kernel.NEW_NET)
        return work()

    # A thread cannot be told apart from others by where it is, so this one serves once and ends.
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(go).result()
