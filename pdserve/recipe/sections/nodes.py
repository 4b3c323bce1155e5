"""Which network the nodes of a deployment use, and what the loss of one of them means."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pdserve.recipe.base import Strict

OnNodeLoss = Literal["fail", "degrade"]


class Network(Strict):
    """Where engines, LMCache and the proxy reach each other. Exactly one of `interface` and `cidr`."""

    interface: str | None = Field(
        default=None, description="Name of the network interface (eth0, ib0), the same on every node."
    )
    cidr: str | None = Field(
        default=None, description="Subnet (10.1.0.0/16): on each node the one address that is in it."
    )
