"""The KV connectors that a role may use. plan/engines/kv_transfer.py turns them into vLLM's JSON."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from pdserve.recipe.base import Count, Strict

TransferMode = Literal["auto", "lmcache_driven", "engine_driven"]


class Leafwise(Strict):
    """What every connector may say as a child of a multi."""

    load_weight: float | None = Field(
        default=None,
        gt=0,
        description="Child of a multi: its tokens count so many times when the child that loads is chosen (1 if null).",
    )


class Mooncake(Leafwise):
    """Prefill pushes KV to decode through the Mooncake transfer engine."""

    kind: Literal["mooncake"] = Field(default="mooncake", description="Mooncake transfer engine, prefill pushes.")
    protocol: Literal["rdma", "tcp"] = Field(
        default="rdma", description="Transport of the transfer engine. rdma is vLLM's default; tcp works everywhere."
    )
    num_workers: Count = Field(
        default=10,
        description="Sender threads of a prefill worker (vLLM's default 10); twice as many transfers run at once.",
    )
    device_name: str = Field(default="", description="RDMA devices, comma separated; empty lets Mooncake choose.")


class Nixl(Leafwise):
    """Decode pulls KV from prefill through NIXL."""

    kind: Literal["nixl"] = Field(default="nixl", description="NIXL, decode pulls.")
    backends: list[str] = Field(default=["UCX"], description="NIXL backends in order of preference.")
    buffer_device: Literal["cpu", "cuda"] | None = Field(
        default=None, description="Where KV is registered; null: cpu on a CPU platform, otherwise the device."
    )
    lease_seconds: Count = Field(default=30, description="How long prefill keeps blocks without a heartbeat.")


class LmcacheMp(Leafwise):
    """Stores KV in, and reloads it from, the LMCache MP server of the same node (section `lmcache`)."""

    kind: Literal["lmcache-mp"] = Field(default="lmcache-mp", description="The LMCache server of the node.")
    transfer_mode: TransferMode | None = Field(
        default=None,
        description="The engine's side of the transfer mode; null: the mode that the server side implies. "
        "A pair that does not match makes the engine hang for the message timeout, so it is refused.",
    )
    max_tokens_per_load: Count | None = Field(
        default=None,
        description="Load at most so many tokens of a prompt from LMCache and compute the rest (whole chunks); "
        "null: no cap. CHUNKED_LMCACHE_MAX_TOKENS_PER_LOAD in the role's env overrides it, 0 turns it off.",
    )
    min_load_tokens: Count | None = Field(
        default=None, description="A reload that would bring fewer tokens than this is computed instead; null: never."
    )


class Raw(Strict):
    """A KVTransferConfig mapping handed to vLLM as it is. Nothing about it is checked: marked unverified."""

    kind: Literal["raw"] = Field(default="raw", description="Not checked.")
    config: dict[str, Any] = Field(description="The whole mapping for --kv-transfer-config.")


Leaf = Annotated[Mooncake | Nixl | LmcacheMp, Field(discriminator="kind")]


class Multi(Strict):
    """vLLM's MultiConnector: loads from the first child that has tokens, saves to every child."""

    kind: Literal["multi"] = Field(default="multi", description="Several connectors at once.")
    of: list[Leaf] = Field(min_length=2, description="Children in order of priority.")


Connector = Annotated[Mooncake | Nixl | LmcacheMp | Multi | Raw, Field(discriminator="kind")]
