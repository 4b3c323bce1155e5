"""A warning where the clients of a Slurm job cannot reach its proxy: pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdserve.plan.nodes.node import Node
from pdserve.plan.nodes.reach import Srun
from pdserve.recipe.model import Recipe

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def hints(recipe: Recipe, nodes: Sequence[Node]) -> Iterator[str]:
    """On one machine loopback is right: its users are the clients. A job's nodes are the scheduler's choice, and its
    clients are on the login node or on other nodes. Once the proxy is open to them, only its keys decide who may ask:
    `allowed_hosts` is about names in requests, not about the machines that they come from."""
    slurm = bool(recipe.slurm.model_fields_set) or any(isinstance(node.reach, Srun) for node in nodes)
    if len(nodes) < 2 or not slurm or recipe.proxy.host not in _LOOPBACK:
        return
    opened = "proxy.host: 0.0.0.0"
    if recipe.proxy.kind == "pdserve":
        opened += " with proxy.auth.keys_file (pdserve new-key NAME --file FILE), which then decides who may ask"
    else:
        opened += ", behind a firewall or a gateway: vllm-router asks for no key"
    yield (
        f"the proxy listens on {recipe.proxy.host} of {nodes[0].name}, the first node of the job: no client on the "
        f"login node or on another node reaches it; set {opened}, or run the clients on that node"
    )
