"""What the probes of MultiConnector found, once for each version."""

from __future__ import annotations

from functools import cache
from typing import Any

from tests.upstream.run import probe


@cache
def measured(version: str) -> Any:
    """selection, lmcache and metrics: see the probes of these names."""
    return probe(version, "tests.upstream.probes.multiconnector")
