"""Workers as a policy sees them."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.pd.config.routing import Routing
from pdserve.pd.routing.build import policy_names


@dataclass
class Worker:
    name: str
    requests: int = 0
    prompt_tokens: int = 0
    kv_usage: float = 0.0


def workers(count: int, prefix: str = "worker") -> list[Worker]:
    return [Worker(f"{prefix}-{index}") for index in range(count)]


PolicyName = str
POLICIES: list[PolicyName] = [*policy_names()]
"""Every one that a recipe can name: what all policies promise is asked of a new one too."""


def everywhere(policy: PolicyName, *, affinity: bool = False) -> Routing:
    """The settings of a proxy that has this policy in every pool."""
    kind = {"kind": policy}
    sessions: dict[str, str] | None = {} if affinity else None
    return Routing.model_validate({"prefill": kind, "decode": kind, "aggregated": kind, "affinity": sessions})
