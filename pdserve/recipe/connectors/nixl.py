"""NIXL: decode pulls KV from prefill, or prefill pushes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

from pydantic import Field

from pdserve.recipe.base import Count, Port, Strict
from pdserve.recipe.connectors.base import Config, ConnectorKind, ConnectorPort, Context, EngineSide, LeafSection
from pdserve.recipe.connectors.trial import TrialTransfer


class NixlPorts(Strict):
    """Its keys of the recipe's `ports`."""

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


def _trial(config: Mapping[str, Any], *, pulled: bool) -> TrialTransfer | None:
    """Only UCX is tried."""
    extra = config.get("kv_connector_extra_config")
    backends = extra.get("backends", ["UCX"]) if isinstance(extra, Mapping) else ["UCX"]
    if backends != ["UCX"]:
        return None
    on_host = config.get("kv_buffer_device") == "cpu"
    return TrialTransfer(engine="nixl", pulled=pulled, host_buffer=on_host, ports=_SIDE_CHANNEL.purpose)


# UCX takes the network devices that it finds: nothing is asked of RDMA devices.
_PULL = ConnectorKind(
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
    trial=partial(_trial, pulled=True),
)


class NixlSection(LeafSection):
    """Decode pulls KV from prefill through NIXL."""

    ABOUT: ClassVar[ConnectorKind] = _PULL

    kind: Literal["nixl"] = Field(default="nixl", description="NIXL, decode pulls.")
    backends: list[str] = Field(default=["UCX"], description="NIXL backends in order of preference.")
    buffer_device: Literal["cpu", "cuda"] | None = Field(
        default=None, description="Where KV is registered; null: cpu on a CPU platform, otherwise the device."
    )
    lease_seconds: Count = Field(default=30, description="How long prefill keeps blocks without a heartbeat.")

    def config(self, context: Context) -> Config:
        """kv_both is deprecated for NIXL since vLLM 0.32: the role's own side is named."""
        config: Config = {"kv_connector": self.ABOUT.class_name, "kv_role": context.kv_role}
        buffer_device = self.buffer_device or ("cpu" if context.platform == "cpu" else None)
        if buffer_device:
            config["kv_buffer_device"] = buffer_device
        extra = {"backends": list(self.backends), "kv_lease_duration": self.lease_seconds}
        return {**config, "kv_connector_extra_config": extra}

    def proxy_settings(self) -> dict[str, Any]:
        return {"kv_lease_seconds": self.lease_seconds}


class NixlPushSection(NixlSection):
    """Prefill pushes KV to decode through NIXL. Both legs of a request are sent at once."""

    # Both shake hands with the other: decode registers its blocks, and prefill needs decode's memory to write there.
    ABOUT: ClassVar[ConnectorKind] = replace(
        _PULL,
        class_name="NixlPushConnector",
        protocol="nixl-push",
        experimental=True,
        trial=partial(_trial, pulled=False),
        ports=(replace(_SIDE_CHANNEL, reached_by={"prefill": ("decode",), "decode": ("prefill",)}),),
    )

    kind: Literal["nixl-push"] = Field(  # type: ignore[assignment]
        default="nixl-push", description="NIXL, prefill pushes."
    )
    registration_seconds: Count = Field(
        default=480,
        description=(
            "How long decode waits for the KV of a prompt, in prefill's queue too, before that counts as a "
            "load that has failed (`kv_load_failure_policy`)."
        ),
    )
    accept_open_cases: bool = Field(
        default=False, description="Must be true: pushes have open cases (docs/limits.md) and were not run on a device."
    )

    def config(self, context: Context) -> Config:
        """The lease is as long as with pulls: decode's heartbeats extend it (patch nixl-push)."""
        config = super().config(context)
        config["kv_connector_extra_config"]["push_registration_timeout"] = self.registration_seconds
        return config

    def doubts(self, platform: str) -> tuple[tuple[str, str], ...]:
        return ((f"nixl-push {OPEN_CASES}", "use kind: nixl unless you have measured that pushes gain something"),)


OPEN_CASES = (
    "was not run on a device, and two cases are open: decode gives blocks back 30 s after prefill's engine is gone, "
    "and a worker of it that still writes after that would corrupt KV; blocks of a prefill that hangs, or of a WRITE "
    "whose end NIXL never reports, stay in use until the engine restarts"
)
"""What is left with the patch nixl-push (patches/nixl/push_decode.py)."""
