"""What the probes of MultiConnector found, once for each version."""

from __future__ import annotations

from functools import cache
from typing import Any

from tests.upstream.run import probe

LMCACHE = {"0.21.0": "0.4.6"}
"""Version of lmcache that goes with one of vllm; the installed one with the others."""


@cache
def measured(version: str) -> Any:
    """selection, lmcache and metrics: see the probes of these names."""
    return probe(version, "tests.upstream.probes.multiconnector", lmcache=LMCACHE.get(version))
