"""The sizing of a whole recipe: roles, LMCache, one request, the start, and the edges that are crossed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdserve.models.weights import Tensor
from pdserve.plan.frozen import Frozen
from pdserve.plan.model import Plan
from pdserve.recipe import effective
from pdserve.recipe.model import Recipe
from pdserve.roles import EngineRole
from pdserve.sizing.engines import RoleSize, Sized, size_role
from pdserve.sizing.findings import Crossing, crossings
from pdserve.sizing.given import Given, Span
from pdserve.sizing.lmcache import L1Size, l1_sizes
from pdserve.sizing.requests import Balance, RequestTransfer, balance, transfer

ENGINE_START_SECONDS = Span(low=30, high=120)
"""Imports, compilation and graphs of an engine, beside its weights: the sources are in docs/plan.md."""


class StartTime(Frozen):
    """From the start of the engines until they serve."""

    weights_bytes: int
    read_seconds: float | None
    """Each node reads the files once; its ranks share the page cache. None: the disk's speed is not given."""
    engine_seconds: Span


class Sizing(Frozen):
    """Everything that `pdserve plan` prints."""

    name: str
    model: str
    architecture: str
    roles: tuple[RoleSize, ...]
    l1: tuple[L1Size, ...]
    transfer: RequestTransfer | None
    balance: Balance | None
    start: StartTime | None
    crossings: tuple[Crossing, ...]
    lacking: str | None = None
    """Files of weights that are not here, while others are: none of them is counted."""


def size_recipe(
    recipe: Recipe,
    plan: Plan,
    config: Mapping[str, Any],
    tensors: tuple[Tensor, ...] | None,
    file_bytes: int,
    given: Given,
) -> Sizing:
    """Raises UnknownModelError and RecipeError."""
    sized: dict[EngineRole, Sized] = {
        name: size_role(recipe, name, role, config, tensors, given) for name, role in recipe.roles()
    }
    servers = l1_sizes(recipe, sized, plan)
    moved = rates = None
    if "prefill" in sized and "decode" in sized:
        prefill, decode = sized["prefill"], sized["decode"]
        if any(effective.transfers_of(connector) for _, _, connector in effective.roles(recipe)):
            moved = transfer(decode.size, decode.cache, given)
        rates = balance(prefill.size, decode.size, given)
    architectures = config.get("architectures") or [str(config.get("model_type", "unknown"))]
    return Sizing(
        name=recipe.name,
        model=plan.model,
        architecture=str(architectures[0]),
        roles=tuple(entry.size for entry in sized.values()),
        l1=tuple(servers),
        transfer=moved,
        balance=rates,
        start=None
        if not file_bytes
        else StartTime(
            weights_bytes=file_bytes,
            read_seconds=None if given.disk_gb is None else file_bytes / (given.disk_gb * 1e9),
            engine_seconds=ENGINE_START_SECONDS,
        ),
        crossings=tuple(crossings(recipe, sized, servers, rates, given)),
    )
