"""How a transfer of a connector is tried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class TrialTransfer:
    """How a transfer of a connector is tried before its engines start (preflight/fabric)."""

    engine: Literal["mooncake", "nixl"]
    pulled: bool
    """Decode reads what prefill has; otherwise prefill writes to decode."""
    host_buffer: bool
    """KV moves through host memory, whatever the device is."""
    ports: str
    """Purpose of ports that an engine process with such transfers has."""
