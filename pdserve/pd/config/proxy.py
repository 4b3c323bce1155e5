"""The proxy's configuration at start: plain data, written to the run directory by the launcher. No secrets.

How the proxy serves has defaults: a configuration that names only its port and its workers is complete.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from pdserve.pd.config.defaults import PROCESSES
from pdserve.pd.config.serving import Serving
from pdserve.roles import EngineRole

Protocol = Literal["mooncake", "nixl", "moriio", "aggregated"]


class FrozenConfig(BaseModel):
    """Takes exact keys, and never changes."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class WorkerConfig(FrozenConfig):
    """One API server of an engine instance, as the proxy sees it."""

    name: str
    """The process name in the plan: prefill-0."""
    role: EngineRole
    url: str
    """http://host:port, without a path."""
    bootstrap_url: str | None = None
    """Mooncake prefill only: http://host:port of its bootstrap server."""
    ranks: Annotated[int, Field(ge=1)] = 1
    """Data-parallel engines behind the URL."""
    kv_events_url: str | None = None
    """tcp://host:port where the engine publishes its KV events; the port of DP rank 0, others follow."""
    kv_replay_url: str | None = None
    """tcp://host:port where events that were missed can be asked for again."""


class ProxyConfig(Serving):
    """Is the proxy's whole configuration: how it serves, and for whom. The engine key comes in the environment
    (PDSERVE_ENGINE_KEY)."""

    # Written by programs, which have what YAML does not: numbers as text, lists as tuples.
    model_config = ConfigDict(strict=False)

    port: int
    served_name: str
    protocol: Protocol
    workers: tuple[WorkerConfig, ...]
    transfer_slots: int = 20
    """Mooncake: transfers that one prefill worker runs at once (2 * num_workers)."""
    kv_lease_seconds: Annotated[float, Field(gt=0)] = 30
    """NIXL: how long a prefill keeps KV that no decode has asked for (kv_lease_duration)."""
    processes: Annotated[int, Field(ge=1)] = PROCESSES
    """Proxy processes that share the port, the load figures and the limits (`proxy.workers` of a recipe)."""

    def lack_of(self, worker: WorkerConfig) -> str:
        """Return what the protocol needs of this worker and it does not have; empty: nothing."""
        if self.protocol == "mooncake" and worker.role == "prefill" and not worker.bootstrap_url:
            return f"{worker.name} has no bootstrap_url, which Mooncake needs"
        return ""
