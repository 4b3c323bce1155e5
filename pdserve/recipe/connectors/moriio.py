"""MoRI-IO: decode reads KV from prefill through AMD's mori. Experimental: no device was at hand.

Facts of vLLM 0.32, kv_connector/v1/moriio. A worker listens at the first port of each kind and its TP rank
(`side_channel_port`, `notify_port`). No proxy is pinged: a worker without `proxy_ip` starts no heartbeat
(`MoRIIOConnectorWorker.__init__`), and the plan knows all workers. `http_port`, which only the heartbeat tells, is read
all the same (`MoRIIOConfig.from_vllm_config`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from pdserve.recipe.base import Count, Port, Seconds, Strict
from pdserve.recipe.connectors.base import Config, ConnectorKind, ConnectorPort, Context, LeafSection

CLASS = "MoRIIOConnector"
PLATFORM = "rocm"
ABORT_SECONDS = 60
"""How much longer than the proxy's limit vLLM waits at least: until then decode has heard of the end of a request that
the proxy has left, and has taken it out of its steps."""
TIMEOUTS = ("transfer_timeout", "recv_abort_timeout", "defer_timeout")
"""vLLM's keys; those of the section end in `_seconds`."""


class MoriioPorts(Strict):
    """Holds MoRI-IO's keys of the recipe's `ports`."""

    moriio_handshake: Port = Field(
        default=6301, description="MoRI-IO handshakes (ZMQ, binds 0.0.0.0), one a tensor-parallel rank."
    )
    moriio_notify: Port = Field(
        default=61005, description="MoRI-IO notifications (ZMQ, binds 0.0.0.0), one a tensor-parallel rank."
    )


def _rdma_devices(config: Mapping[str, Any], variables: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return no names, unless the backend is xgmi: mori chooses among the node's RDMA devices."""
    extra = config.get("kv_connector_extra_config")
    return None if isinstance(extra, Mapping) and extra.get("backend") == "xgmi" else ()


def _port(key: str, purpose: str, what: str, exposes: str) -> ConnectorPort:
    return ConnectorPort(
        key=key,
        purpose=purpose,
        what=what,
        exposes=exposes,
        used_by="workers of decode; binds 0.0.0.0",
        reached_by={"prefill": ("decode",)},
        per_worker=True,
        everywhere=True,
    )


_ENGINE = "MoRI-IO engine, one a worker: sets up RDMA transfers"


class MoriioSection(LeafSection):
    """Decode reads KV from prefill through AMD's MoRI-IO. Experimental: docs/moriio.md has what it can do to KV."""

    ABOUT: ClassVar[ConnectorKind] = ConnectorKind(
        class_name=CLASS,
        package="mori",
        protocol="moriio",
        experimental=True,
        ports=(
            _port(
                "moriio_handshake",
                "handshake",
                "MoRI-IO handshakes",
                "MoRI-IO handshake: addresses and keys by which KV memory is read and written",
            ),
            _port(
                "moriio_notify",
                "notify",
                "MoRI-IO notifications",
                "MoRI-IO notifications: frees the KV of a prompt that decode still needs",
            ),
        ),
        random_ports={"prefill": _ENGINE, "decode": _ENGINE},
        owned_variables={"VLLM_MORIIO_TRANSFER_TIMEOUT_S": "set recv_abort_timeout_seconds of the connector"},
        rdma_devices=_rdma_devices,
    )
    AGREED = ("backend",)

    kind: Literal["moriio"] = Field(default="moriio", description="MoRI-IO on ROCm, decode reads. Experimental.")
    accept_unsafe_aborts: bool = Field(
        default=False,
        description="Must be true. A transfer of MoRI-IO that is given up or whose request is aborted is not stopped: "
        "it may write into blocks that other prompts have by then. No setting closes that (docs/moriio.md).",
    )
    backend: Literal["rdma", "xgmi"] = Field(
        default="rdma", description="How mori moves KV; xgmi: between the GPUs of one node."
    )
    qp_per_transfer: Count = Field(default=1, description="RDMA queue pairs of one transfer.")
    post_batch_size: int = Field(default=-1, description="Work requests that are posted at once; -1: mori chooses.")
    num_workers: Count = Field(default=1, description="Threads of mori's engine for transfers.")
    transfer_timeout_seconds: Seconds | None = Field(
        default=None,
        description="How long decode waits for a read before it computes on without its KV. null: "
        "proxy.request_timeout_seconds and 60 s; less is refused.",
    )
    recv_abort_timeout_seconds: Seconds | None = Field(
        default=None,
        description="After that time decode reports a read as failed and forgets it. null: as "
        "transfer_timeout_seconds; more than that is refused: decode would answer from what has not arrived.",
    )
    defer_timeout_seconds: Seconds | None = Field(
        default=None,
        description="After that time prefill frees the blocks of a prompt, read or not. null: "
        "proxy.request_timeout_seconds and 60 s; less is refused.",
    )

    def seconds(self, request_seconds: float) -> dict[str, float]:
        """Return vLLM's three limits by its own keys, for a proxy that ends a request after `request_seconds`."""
        least = request_seconds + ABORT_SECONDS
        transfer = self.transfer_timeout_seconds or least
        received = self.recv_abort_timeout_seconds or transfer
        return dict(zip(TIMEOUTS, (transfer, received, self.defer_timeout_seconds or least), strict=True))

    def config(self, context: Context) -> Config:
        ports = {purpose: taken.start for purpose, taken in context.ports.items()}
        placed: Config = {} if not ports else {
            "host_ip": context.address,
            "http_port": ports["http"],
            "handshake_port": ports["handshake"],
            "notify_port": ports["notify"],
        }  # fmt: skip
        extra: Config = {
            **placed,
            "read_mode": True,
            "backend": self.backend,
            "qp_per_transfer": self.qp_per_transfer,
            "post_batch_size": self.post_batch_size,
            "num_workers": self.num_workers,
            **self.seconds(context.request_seconds),
        }
        return {
            "kv_connector": self.ABOUT.class_name,
            **context.module(self.ABOUT.class_name),
            "kv_role": context.kv_role,
            "kv_connector_extra_config": extra,
        }

    def doubts(self, platform: str) -> tuple[tuple[str, str], ...]:
        if not self.accept_unsafe_aborts:
            return ()  # refused
        return (
            (
                "moriio is untested, and no setting stops a transfer that vLLM 0.32 has given up: it may still write "
                "into blocks of other prompts (docs/moriio.md)",
                "use kind: nixl or kind: mooncake where every answer must be right",
            ),
        )
