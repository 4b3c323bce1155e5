"""What the probe of MooncakeConnector found, once for each version."""

from __future__ import annotations

from functools import cache
from typing import Any

from tests.upstream.run import probe


@cache
def measured(version: str) -> Any:
    """Scenarios of probes/mooncake_transfers.py, each as [without the patches, with them]."""
    return probe(version, "tests.upstream.probes.mooncake_transfers")
