"""NIXL: decode pulls KV from prefill."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from pdserve.recipe.base import Count, Port, Strict, TrialTransfer
from pdserve.recipe.connectors.base import (
    Config,
    ConnectorKind,
    ConnectorPort,
    Context,
    EngineSide,
    LeafSection,
)


class NixlPorts(Strict):
    """Holds NIXL's keys of the recipe's `ports`."""

    nixl: Port = Field(default=5600, description="NIXL side channel; an API server takes one for each rank.")


def _environment(side: EngineSide) -> dict[str, str]:
    if not (ports := side.ports.get("nixl")):
        return {}
    # vLLM adds the rank, counted over all API servers of an instance.
    first = str(ports.start - side.first_rank)
    return {"VLLM_NIXL_SIDE_CHANNEL_HOST": side.address, "VLLM_NIXL_SIDE_CHANNEL_PORT": first}


_SIDE_CHANNEL = ConnectorPort(
    key="nixl",
    purpose="nixl",
    what="NIXL side channels",
    exposes="NIXL side channel: transfer metadata of the engine",
    used_by="the other role",
    reached_by={"prefill": ("decode",)},
    per_rank=True,
)


def _trial(config: Mapping[str, Any]) -> TrialTransfer | None:
    """Return the trial of a transfer over UCX; None: another backend."""
    extra = config.get("kv_connector_extra_config")
    backends = extra.get("backends", ["UCX"]) if isinstance(extra, Mapping) else ["UCX"]
    if backends != ["UCX"]:
        return None
    on_host = config.get("kv_buffer_device") == "cpu"
    return TrialTransfer(engine="nixl", pulled=True, host_buffer=on_host, ports=_SIDE_CHANNEL.purpose)


# UCX takes the network devices that it finds: nothing is asked of RDMA devices.
_NIXL = ConnectorKind(
    class_name="NixlConnector",
    package="nixl",
    protocol="nixl",
    tp_must_divide=True,
    ports=(_SIDE_CHANNEL,),
    environment=_environment,
    owned_variables={
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "it is the address of the engine's node",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "set ports.nixl",
    },
    trial=_trial,
)


class NixlSection(LeafSection):
    """Decode pulls KV from prefill through NIXL."""

    ABOUT: ClassVar[ConnectorKind] = _NIXL

    kind: Literal["nixl"] = Field(default="nixl", description="NIXL, decode pulls.")
    backends: list[str] = Field(default=["UCX"], description="NIXL backends in order of preference.")
    buffer_device: Literal["cpu", "cuda"] | None = Field(
        default=None, description="Where KV is registered; null: cpu on a CPU platform, otherwise the device."
    )
    lease_seconds: Count = Field(default=30, description="How long prefill keeps blocks without a heartbeat.")

    def config(self, context: Context) -> Config:
        """Return the mapping, with the role's own side: kv_both is deprecated for NIXL since vLLM 0.32."""
        config: Config = {"kv_connector": self.ABOUT.class_name, "kv_role": context.kv_role}
        buffer_device = self.buffer_device or ("cpu" if context.platform == "cpu" else None)
        if buffer_device:
            config["kv_buffer_device"] = buffer_device
        extra = {"backends": list(self.backends), "kv_lease_duration": self.lease_seconds}
        return {**config, "kv_connector_extra_config": extra}

    def proxy_settings(self) -> dict[str, Any]:
        return {"kv_lease_seconds": self.lease_seconds}
