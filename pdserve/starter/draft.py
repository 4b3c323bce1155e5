"""A wish to a recipe as data, with the reason of each value."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from pdserve.errors import RecipeError
from pdserve.models.unknown import UnknownModelError
from pdserve.plan.engines.kv_groups import good_chunk, table_groups
from pdserve.recipe.load.corrections import as_name
from pdserve.recipe.load.environment import escape
from pdserve.recipe.load.problems import Path
from pdserve.recipe.model import Recipe
from pdserve.recipe.sections import Eviction
from pdserve.sizing.engines import Sized, size_role
from pdserve.sizing.given import GIB, Given
from pdserve.sizing.lmcache import stored_token_bytes
from pdserve.starter.goal import Goal
from pdserve.starter.layout import Layout, choose, numbers
from pdserve.starter.wish import InitChoice

_CHUNK = 256
_L1_GIB = 64
_MOST_L1_GIB = 900
"""907 GB registered with MI355X, 1360 GB did not (recipes/base/kimi-k2.5-mxfp4-mi355x.yaml)."""
_SHORTEST = 8192
"""Tokens: below it, a model that leaves too little KV is refused."""


class Starter:
    """A recipe's document, and a comment for values of it."""

    def __init__(self) -> None:
        self.document: dict[str, Any] = {}
        self.reasons: dict[Path, str] = {}

    def put(self, *path: str | int, value: Any, reason: str | None = None) -> None:
        """Set a value. A path leads through mappings only."""
        into = self.document
        for part, _ in pairwise(path):
            into = into.setdefault(str(part), {})
        into[str(path[-1])] = escape(value)
        if reason is not None:
            self.reasons[path] = reason


def draft(wish: InitChoice) -> Starter:
    """Raises RecipeError where the model cannot be held by the hardware."""
    while True:
        try:
            return _written(wish, choose(wish, partial(_sized, wish)))
        except RecipeError:
            if min(wish.longest, wish.length or 0) <= _SHORTEST:
                raise
            wish = replace(wish, longest=wish.longest // 2)


def _sized(wish: InitChoice, layout: Layout) -> Sized | None:
    if wish.config is None or wish.length is None:
        return None
    recipe = Recipe.model_validate(_written(wish, layout).document)
    name, role = recipe.roles()[0]
    given = Given(device_gib=wish.hardware.device_gib or None)
    try:
        return size_role(recipe, name, role, wish.config, wish.tensors, given)
    except UnknownModelError:
        return None


def _written(wish: InitChoice, layout: Layout) -> Starter:
    made, hardware = Starter(), wish.hardware
    name = as_name(f"{wish.name}-{hardware.name}") or "first"
    made.put("schema", value=1)
    made.put("name", value=name)
    made.put("description", value=f"{wish.name} on {wish.nodes} node(s) of {hardware.name}, for {wish.goal}.")
    made.put("status", value="untested", reason="nothing was started yet")
    made.put("platform", value=hardware.platform, reason=f"--hardware {hardware.name}")
    if wish.devices:
        made.put("devices_per_node", value=wish.devices, reason="--gpus-per-node, or the usual node")
    if layout.aggregated:
        made.put("mode", value="aggregated", reason="one instance fills the node: more nodes give prefill and decode")
    for package, versions in _requires(wish, layout).items():
        made.put("requires", package, value=versions, reason="as in the shipped recipes")
    _model(wish, made)
    if wish.length is not None:
        made.put("engine", "args", "max-model-len", value=wish.length, reason=wish.length_reason)
    for flag, (value, reason) in hardware.args.items():
        made.put("engine", "args", flag, value=value, reason=reason)
    for variable, (value, reason) in hardware.env.items():
        made.put("engine", "env", variable, value=value, reason=reason)
    _roles(wish, layout, made)
    if wish.goal is Goal.AGENTS:
        _agents(wish, layout, made)
    if wish.nodes > 1:
        made.put("slurm", "nodes", value=wish.nodes, reason="--nodes; used in a Slurm job only")
    if wish.devices:
        made.put("timeouts", "engine_seconds", value=3600, reason="large weights take half an hour from a file system")
        made.put("timeouts", "canary_seconds", value=600, reason="the first request compiles")
    return made


def _requires(wish: InitChoice, layout: Layout) -> dict[str, str]:
    needed = {"vllm": ">=0.26,<0.34"}
    if wish.goal is Goal.AGENTS:
        needed["lmcache"] = ">=0.5.6,<0.6"
    if not layout.aggregated and wish.hardware.transfer["kind"] == "mooncake":
        needed["mooncake"] = ">=0.3.13"
    return needed


def _model(wish: InitChoice, made: Starter) -> None:
    if wish.path is not None:
        known = "" if wish.config is not None else ", NOT CHECKED: no config.json there that can be read"
        made.put("model", "path", value=wish.path, reason=f"on every node{known}")
    else:
        known = "read from the hub's cache" if wish.config is not None else "NOT CHECKED: not in the hub's cache here"
        made.put("model", "id", value=wish.id, reason=known)
    made.put("model", "served_name", value=wish.name.lower(), reason="what clients write as the model")


def _roles(wish: InitChoice, layout: Layout, made: Starter) -> None:
    counts = (
        {"aggregated": layout.prefill} if layout.aggregated else {"prefill": layout.prefill, "decode": layout.decode}
    )
    for number, (role, instances) in enumerate(counts.items()):
        ratio = "the ratio is a start: measure, then `pdserve plan --prefill-rate --decode-rate`"
        made.put(role, "instances", value=instances, reason=None if number or layout.aggregated else ratio)
        made.put(role, "parallel", "tp", value=layout.tp, reason=None if number else layout.reason)
        if layout.sized is not None and layout.sized.size.weights_bytes is not None and wish.devices and not number:
            made.reasons[(role, "parallel")] = numbers(wish, layout.sized)
        transfer = [] if layout.aggregated else [dict(wish.hardware.transfer)]
        keeps = wish.goal is Goal.AGENTS and role != "decode"
        parts = [*transfer, *([{"kind": "lmcache-mp"}] if keeps else [])]
        if len(parts) == 1:
            reason = None if number or not transfer else wish.hardware.transfer_reason
            made.put(role, "connector", value=parts[0], reason=reason)
        elif parts:
            made.put(role, "connector", value={"kind": "multi", "of": parts}, reason=wish.hardware.transfer_reason)


def _agents(wish: InitChoice, layout: Layout, made: Starter) -> None:
    """Long prompts that begin as earlier ones did: old prefixes stay in host memory."""
    role = "aggregated" if layout.aggregated else "prefill"
    made.put("lmcache", "on", value=[role], reason="--goal agents: old prefixes are read back, not computed again")
    l1, why = _l1(wish, layout)
    made.put("lmcache", "l1_size_gb", value=l1, reason=why)
    chunk = _CHUNK if layout.sized is None else good_chunk(table_groups(layout.sized.cache), _CHUNK)
    made.put("lmcache", "chunk_size", value=chunk, reason="tokens; whole blocks of the engine")
    if wish.hardware.platform == "cpu":
        made.put("lmcache", "transfer_mode", value="auto", reason="an engine on a CPU moves the bytes itself")
    elif wish.hardware.platform == "rocm":
        pinned = math.ceil((l1 + wish.devices * wish.hardware.device_gib) / 60) * 60
        made.put("lmcache", "mq_timeout_seconds", value=pinned, reason="a second for each GiB of L1 and devices")
    if not layout.aggregated and layout.prefill > 1:
        made.put("proxy", "routing", "prefill", "kind", value="prefix_aware", reason="a prompt goes where its start is")


def _l1(wish: InitChoice, layout: Layout) -> tuple[int, str]:
    tokens = None if layout.sized is None else layout.sized.size.tokens
    if layout.sized is None or tokens is None:
        return _L1_GIB, "GiB a node, NOT CHECKED against the KV of an engine: pdserve plan says what it holds"
    held = tokens.high * stored_token_bytes(layout.sized.cache, layout.tp)
    # Prefills are placed first, and fill a node before the next. A node without devices has one.
    engines = min(layout.prefill, max(wish.devices // layout.tp, 1))
    gib = math.ceil(held * engines / Eviction().watermark / GIB)
    if gib > _MOST_L1_GIB:
        return _MOST_L1_GIB, f"GiB a node: the largest seen to register; the KV of {engines} engine(s) would fill {gib}"
    return gib, f"GiB a node: what {engines} engine(s) keep themselves; host memory is not checked before preflight"
