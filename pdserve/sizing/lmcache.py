"""What LMCache's L1 holds, in tokens, and how long it takes to register."""

from __future__ import annotations

from collections.abc import Mapping

from pdserve.models.kv_cache import KvCache
from pdserve.plan.frozen import Frozen
from pdserve.plan.model import LmcacheServer, Plan
from pdserve.recipe import effective
from pdserve.recipe.model import Recipe
from pdserve.recipe.rules.caches import SECONDS_A_GIB
from pdserve.roles import EngineRole
from pdserve.sizing.engines import Sized
from pdserve.sizing.given import GIB


class L1Size(Frozen):
    """One server, for the engines of one role. Tokens are at most: a group that forgets (windows, recurrent state) is
    counted as if every block of it were stored."""

    role: EngineRole
    per: str
    """node or tp-rank."""
    l1_gib: float
    token_bytes: float
    """Of a token in this server: of all ranks, or of a rank where each has a server. MLA alone is stored once."""
    tokens: int
    """That fit."""
    kept_tokens: int
    """At the watermark, where eviction starts."""
    chunk_bytes: float
    engines: int
    """Of this role beside one server, at most."""
    engine_tokens: float | None
    """What the KV cache of one engine holds, at most; None: not known."""
    pinned_gib: float
    """L1 and the KV that its engines register."""
    registration_seconds: float
    """By the rule of a second a GiB, seen on ROCm; on a CPU nothing is pinned."""
    shm_gib: float
    """Of L1 in /dev/shm, and of the KV that engines on a CPU move there."""


def l1_sizes(recipe: Recipe, sized: Mapping[EngineRole, Sized], plan: Plan) -> list[L1Size]:
    """A size for each role that attaches."""
    section = recipe.lmcache
    if section is None:
        return []
    sizes = []
    for name, _, connector in effective.roles(recipe):
        if name not in section.on or not effective.lmcache_leaves(connector) or name not in sized:
            continue
        size, cache = sized[name].size, sized[name].cache
        ranks = size.tp * size.pp
        token = stored_token_bytes(cache, 1 if section.per == "tp-rank" else size.tp)
        room = section.l1_size_gb * GIB
        tokens = int(room / token)
        servers = [_engines_of(plan, server, name) for server in plan.lmcache]
        here, server = max(zip(servers, plan.lmcache, strict=True), key=lambda pair: pair[0])
        held = None if size.tokens is None else size.tokens.high
        registered = 0.0 if size.kv_bytes is None else size.kv_bytes.high * ranks * size.dp * here / GIB
        pinned = section.l1_size_gb + (registered / size.tp if section.per == "tp-rank" else registered)
        sizes.append(
            L1Size(
                role=name,
                per=section.per,
                l1_gib=section.l1_size_gb,
                token_bytes=token,
                tokens=tokens,
                kept_tokens=int(tokens * section.eviction.watermark),
                chunk_bytes=token * section.chunk_size,
                engines=here,
                engine_tokens=held,
                pinned_gib=pinned,
                registration_seconds=0.0 if recipe.platform == "cpu" else pinned * SECONDS_A_GIB,
                shm_gib=(section.l1_size_gb if section.shm_name else 0.0) + server.kv_bytes_on_host / GIB,
            )
        )
    return sizes


def _engines_of(plan: Plan, server: LmcacheServer, role: EngineRole) -> int:
    return sum(plan.process(engine).role == role for engine in server.engines)


def stored_token_bytes(cache: KvCache, tp: int) -> float:
    """Of one token over all layers. Ranks whose KV is the same are stored once (LMCache's mla_only)."""
    return cache.token_bytes * (1 if cache.ranks_share else tp)
