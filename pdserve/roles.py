"""The roles of the processes of a deployment: the one vocabulary of recipes, plans, state files and the proxy."""

from __future__ import annotations

from typing import Literal, TypeGuard, get_args

EngineRole = Literal["prefill", "decode", "aggregated"]
"""prefill computes the KV of prompts, decode writes the answers, aggregated does both."""

ProcessRole = Literal["setup", "weights", "lmcache", "mooncake-master", EngineRole, "proxy"]
"""setup is a command of the recipe, and ends; weights fetches the model, and ends; lmcache keeps KV in host memory;
mooncake-master knows where the engines' common pool has it; the proxy is what clients talk to."""

ENGINE_ROLES: tuple[EngineRole, ...] = get_args(EngineRole)


def is_engine(role: str) -> TypeGuard[EngineRole]:
    """Tell whether a role is that of a vLLM engine."""
    return role in ENGINE_ROLES
