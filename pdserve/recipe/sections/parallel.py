"""The section `parallel` of a role: how one engine instance is spread over devices, nodes and API servers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pdserve.recipe.base import Count, Strict

LoadBalancing = Literal["internal", "hybrid", "external"]


class Parallel(Strict):
    """Parallelism of one instance; devices needed = tp * pp * pcp * dp."""

    tp: Count = Field(default=1, description="Tensor parallel size.")
    pp: Count = Field(default=1, description="Pipeline parallel size.")
    pcp: Count = Field(
        default=1,
        description="Prefill context parallel size: workers that share the computation of a prompt. They are workers "
        "beside the tp * pp others, not a part of them.",
    )
    dp: Count = Field(default=1, description="Data parallel size: engine ranks of one instance.")
    load_balancing: LoadBalancing = Field(
        default="internal",
        description="Who chooses the data-parallel rank of a request. internal: one API server for all ranks. hybrid: "
        "an API server on each node, which chooses among the ranks of its node. external: an API server for each rank, "
        "in a process of its own. Every API server is a worker of the proxy.",
    )
    api_servers: Count = Field(
        default=1,
        description="Processes of an API server: they share its port and its ranks. vLLM starts dp of them by itself; "
        "more than one pays where tokenising or streaming fills a core.",
    )
    ep: bool = Field(default=False, description="Expert parallelism over the tp * pcp * dp ranks.")
    nodes: Count = Field(default=1, description="Nodes that one instance spans.")

    @property
    def workers(self) -> int:
        """Engine workers, and on accelerators devices, of one instance."""
        return self.tp * self.pp * self.pcp * self.dp

    @property
    def processes(self) -> int:
        """Processes of one instance: one for each rank with external load balancing, else one on each node."""
        return self.dp if self.load_balancing == "external" else self.nodes

    @property
    def servers(self) -> int:
        """Those of them that have an API server."""
        return 1 if self.load_balancing == "internal" else self.processes

    @property
    def ranks_of_server(self) -> int:
        """Data-parallel ranks that an API server chooses among."""
        return self.dp // self.servers

    def product(self) -> str:
        """`tp 4 x dp 2`, for messages: the sizes above 1."""
        sizes = {"tp": self.tp, "pp": self.pp, "pcp": self.pcp, "dp": self.dp}
        return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "tp 1"
