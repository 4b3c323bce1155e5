"""Which parts a deployment has: what is not there gets no panel and no alert."""

from __future__ import annotations

from typing import Literal

from pdserve.plan.model import Plan

Part = Literal["proxy", "engines", "disaggregated", "mooncake", "nixl", "lmcache", "mooncake-store"]
"""proxy: pdserve's own; vllm-router has metrics of its own, which are scraped and have no panels here."""

_CONNECTORS: dict[Part, frozenset[str]] = {
    "mooncake": frozenset({"MooncakeConnector"}),
    "nixl": frozenset({"NixlConnector"}),
}
"""vLLM's classes."""


def parts_of(plan: Plan) -> frozenset[Part]:
    """The parts of this plan."""
    classes = {connector.class_name for process in plan.processes for connector in process.connectors}
    present: dict[Part, bool] = {
        "proxy": plan.proxy_kind == "pdserve",
        "engines": True,
        "disaggregated": plan.mode == "disaggregated",
        **{part: bool(names & classes) for part, names in _CONNECTORS.items()},
        "lmcache": bool(plan.lmcache),
        "mooncake-store": any(process.is_store_master for process in plan.processes),
    }
    return frozenset(part for part, there in present.items() if there)
