"""Which network the nodes of a deployment use, and what the loss of one of them means."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pdserve.recipe.base import Strict

OnNodeLoss = Literal["fail", "degrade"]


class Fabric(Strict):
    """The fabric check: a real transfer for each pair of nodes that will move KV, before anything starts."""

    check: bool = Field(
        default=True,
        description="Whether `up` over several nodes makes the check. It takes seconds. Mooncake and "
        "NIXL over UCX are tried, other connectors are not. `pdserve preflight RECIPE --fabric` makes it in any case.",
    )
    min_gbps: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None,
        description="10^9 bits a second that each pair must reach, with one sender; null: any rate.",
    )


class Network(Strict):
    """Where engines, LMCache and the proxy reach each other. Exactly one of `interface` and `cidr`."""

    interface: str | None = Field(
        default=None, description="Name of the network interface (eth0, ib0), the same on every node."
    )
    cidr: str | None = Field(
        default=None, description="Subnet (10.1.0.0/16): on each node the one address that is in it."
    )
