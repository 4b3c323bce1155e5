"""Edges that a deployment crosses, each with the number that crosses it and what to write instead."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from pdserve.models.kv_cache import NULL_BLOCK
from pdserve.plan.engines.kv_groups import can_store, good_chunk, lmcache_refusal, table_groups
from pdserve.plan.frozen import Frozen
from pdserve.recipe.load.problems import dotted
from pdserve.recipe.model import Recipe
from pdserve.recipe.rules.caches import STEP_SECONDS
from pdserve.recipe.rules.engines import flag_path
from pdserve.roles import EngineRole
from pdserve.sizing.engines import Sized
from pdserve.sizing.given import Given
from pdserve.sizing.lmcache import L1Size
from pdserve.sizing.requests import Balance

Severity = Literal["error", "warning"]
"""error: the deployment does not start, or part of it can never work."""


class Crossing(Frozen):
    """One edge that is crossed."""

    severity: Severity
    where: str
    """Key of the recipe."""
    what: str
    todo: str


def crossings(
    recipe: Recipe,
    sized: Mapping[EngineRole, Sized],
    l1: Sequence[L1Size],
    balance: Balance | None,
    given: Given,
) -> Iterator[Crossing]:
    """All of them."""
    for entry in sized.values():
        yield from _fits(recipe, entry)
        yield from _chunks(recipe, entry)
    for server in l1:
        yield from _write_only(recipe, server)
        yield from _registration(recipe, server)
    yield from _lease(recipe, given)
    yield from _ratio(balance)


def _fits(recipe: Recipe, entry: Sized) -> Iterator[Crossing]:
    size, cache = entry.size, entry.cache
    if size.blocks is None:
        return
    usable_low, usable_high = int(size.blocks.low) - NULL_BLOCK, int(size.blocks.high) - NULL_BLOCK
    if cache.blocks_a_request <= usable_low:
        return
    never = cache.blocks_a_request > usable_high
    longest = cache.longest_request(usable_high if never else usable_low)
    key = dotted(flag_path(recipe, size.role, "max-model-len"))
    shorter = f"lower max-model-len of every role to {longest} or less ({key}), " if longest else ""
    yield Crossing(
        severity="error" if never else "warning",
        where=key,
        what=f"a request of {size.model_len} tokens needs {cache.blocks_a_request} blocks, and a rank of {size.role} "
        f"can use {_range(max(usable_low, 0), max(usable_high, 0))}: vLLM {'refuses' if never else 'may refuse'} to "
        "start",
        todo=f"{shorter}raise {size.role}.parallel.tp, or give KV more memory",
    )


def _chunks(recipe: Recipe, entry: Sized) -> Iterator[Crossing]:
    section, size = recipe.lmcache, entry.size
    if section is None or size.role not in section.on:
        return
    groups = table_groups(entry.cache)
    if any(group.mode == "none" for group in groups):
        yield Crossing(
            severity="error",
            where=f"{size.role}.args.enable-prefix-caching",
            what="without prefix caching vLLM keeps no recurrent state that LMCache could store",
            todo=f"remove {size.role}.args.enable-prefix-caching",
        )
        return
    if (why := lmcache_refusal(groups, section.chunk_size)) is not None:
        # On a GPU the block of a model with state is computed for the usual attention backends only.
        sure = recipe.platform == "cpu" or all(group.kind == "attention" for group in groups)
        yield Crossing(
            severity="error" if sure else "warning",
            where="lmcache.chunk_size",
            what=f"LMCache would end at the start: {why}",
            todo=f"write lmcache.chunk_size: {good_chunk(groups, section.chunk_size)}",
        )
    if not can_store(section.chunk_size, size.model_len - 1):
        smaller = good_chunk(groups, max(size.model_len // 4, 1))
        fits = can_store(smaller, size.model_len - 1)
        key = dotted(flag_path(recipe, size.role, "max-model-len"))
        yield Crossing(
            severity="error",
            where="lmcache.chunk_size",
            what=f"no prompt of at most {size.model_len - 1} tokens fills a chunk of {section.chunk_size} tokens: "
            "nothing would ever be stored",
            todo=f"write lmcache.chunk_size: {smaller}" if fits else f"write {key}: {2 * smaller} or more",
        )


def _write_only(recipe: Recipe, server: L1Size) -> Iterator[Crossing]:
    if server.engine_tokens is None:
        return
    held = server.engine_tokens * server.engines
    if server.kept_tokens >= held:
        return
    needed = math.ceil(server.l1_gib * held / server.kept_tokens) if server.kept_tokens else 1
    if server.engines == 1:
        who, reader = f"an engine of {server.role} holds up to {int(held)} itself", "after a restart of the engine"
    else:
        who = f"the {server.engines} engines of {server.role} beside it hold up to {int(held)} themselves"
        reader = "by another engine, or after a restart"
    yield Crossing(
        severity="warning",
        where="lmcache.l1_size_gb",
        what=f"L1 keeps {server.kept_tokens} tokens, and {who}: what an engine evicts has left L1 already, so L1 is "
        f"read only {reader}",
        todo=f"write lmcache.l1_size_gb: {needed} or more, or take {server.role} out of lmcache.on",
    )


def _registration(recipe: Recipe, server: L1Size) -> Iterator[Crossing]:
    section = recipe.lmcache
    if section is None or recipe.platform != "rocm" or section.mq_timeout_seconds >= server.registration_seconds:
        return
    advised = math.ceil(server.registration_seconds / STEP_SECONDS) * STEP_SECONDS
    yield Crossing(
        severity="warning",
        where="lmcache.mq_timeout_seconds",
        what=f"{server.pinned_gib:.0f} GiB are pinned and mapped while engines register, about "
        f"{server.registration_seconds:.0f} s at a second a GiB, and the engines give up after "
        f"{section.mq_timeout_seconds:g} s",
        todo=f"write lmcache.mq_timeout_seconds: {advised}",
    )


def _lease(recipe: Recipe, given: Given) -> Iterator[Crossing]:
    section = recipe.lmcache
    if section is None or given.queue_seconds is None or given.queue_seconds < section.l1_read_ttl_seconds:
        return
    yield Crossing(
        severity="warning",
        where="lmcache.l1_read_ttl_seconds",
        what=f"a request waits up to {given.queue_seconds:g} s, and the lease of what was looked up for it ends after "
        f"{section.l1_read_ttl_seconds} s: it would be there and not readable",
        todo=f"write lmcache.l1_read_ttl_seconds: {math.ceil(2 * given.queue_seconds)}",
    )


def _ratio(balance: Balance | None) -> Iterator[Crossing]:
    if balance is None or balance.starved is None:
        return
    full = "decode" if balance.starved == "prefill" else "prefill"
    ratio = max(balance.prefill, balance.decode) / min(balance.prefill, balance.decode)
    yield Crossing(
        severity="warning",
        where=f"{full}.instances",
        what=f"prefill can do {balance.prefill:.3g} requests a second and decode {balance.decode:.3g}: "
        f"{balance.starved} is used to {1 / ratio:.0%}",
        todo=f"give {full} {ratio:.2g} times its instances, or {balance.starved} fewer",
    )


def _range(low: int, high: int) -> str:
    return f"{low}" if low == high else f"{low} to {high}"
