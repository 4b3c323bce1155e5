"""What the probe `guards` saw on each version: run once, looked at by several tests."""

from __future__ import annotations

from functools import cache
from typing import Any

from tests.upstream.run import probe


@cache
def guards(version: str) -> Any:
    # The order in which the scheduler goes through sets of ids is part of what a seed stands for.
    return probe(version, "tests.upstream.probes.guards", env={"PYTHONHASHSEED": "0"})
