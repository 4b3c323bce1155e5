"""The `mooncake_store:` section: a pool of host memory that the engines of a deployment share, and its master."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pdserve.recipe.base import MOST_GIB, Strict


class MooncakeStore(Strict):
    """A Mooncake store: each engine worker gives memory to the pool, and one master (`mooncake_master`) knows what is
    where."""

    segment_gib: float = Field(
        gt=0,
        le=MOST_GIB,
        description="Host memory that each engine worker gives to the pool, GiB (global_segment_size). All of it is "
        "committed at start, and its content is lost with the engine.",
    )
    buffer_gib: float = Field(
        default=4,
        gt=0,
        le=MOST_GIB,
        description="Host memory of each engine worker for transfers, GiB (local_buffer_size; vLLM's default 4).",
    )
    protocol: Literal["rdma", "tcp"] = Field(
        default="rdma",
        description="Transport of all engines of the pool. rdma is vLLM's default; tcp works everywhere.",
    )
    device_name: str = Field(
        default="",
        description="RDMA devices of each node, comma separated, which preflight looks for there; empty lets Mooncake "
        "choose.",
    )
    on_death: Literal["restart", "fail"] = Field(
        default="restart",
        description="What follows when the master dies. restart: it is started again on its ports; until then a "
        "prompt waits 4 s for its lookup and is then computed, and what the pool held is lost. fail: the deployment "
        "fails.",
    )
    command: list[str] | None = Field(
        default=None, min_length=1, description="Replaces `python -m mooncake.cli`; the flags are appended."
    )
    extra_args: dict[str, bool | int | float | str] = Field(
        default={}, description="Further flags of mooncake_master, without the dashes: eviction_ratio: 0.1."
    )
