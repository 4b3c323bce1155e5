"""What the probe `guards` saw on each version: run once, looked at by several tests."""

from __future__ import annotations

from functools import cache
from typing import Any

from tests.upstream.run import probe


@cache
def guards(version: str) -> Any:
    return probe(version, "tests.upstream.probes.guards")
