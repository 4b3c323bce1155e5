"""Rules of sections, model, devices and parallelism: within a role, and between prefill and decode."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pdserve.recipe.connectors.mooncake import MooncakeSection
from pdserve.recipe.connectors.nixl import NixlSection
from pdserve.recipe.connectors.registry import class_names
from pdserve.recipe.effective import args_of, first_transfer_of, roles
from pdserve.recipe.load import show
from pdserve.recipe.load.problems import Line, Path, Problem
from pdserve.recipe.model import Parallel, Recipe
from pdserve.recipe.rules.engines import flag_path

_MODEL = Line(("model", "id"), "org/model", example=True)
_CLAUSE = re.compile(r"^\s*(~=|===?|!=|<=|>=|<|>)\s*[0-9A-Za-z][0-9A-Za-z.*+!_-]*\s*$")


def unused_roles(recipe: Recipe) -> Iterator[Problem]:
    """Refuse a role section that the mode does not use: it would be ignored without a word."""
    unused = ("prefill", "decode") if recipe.mode == "aggregated" else ("aggregated",)
    for name in unused:
        if getattr(recipe, name) is not None:
            yield Problem(
                (name,),
                f"mode {recipe.mode} has no role {name}",
                "remove the section, or change the mode",
                also=(("mode",),),
            )


def model_source(recipe: Recipe) -> Iterator[Problem]:
    """Check that there is exactly one of path and id."""
    path, id_ = recipe.model.path, recipe.model.id
    if path is None and id_ is None:
        yield Problem(("model",), "neither path nor id is set", "set model.path (a folder) or model.id", write=_MODEL)
    if path is not None and id_ is not None:
        yield Problem(
            ("model", "path"),
            "both path and id are set",
            "keep one of them, here or with --unset model.id",
            also=(("model", "id"),),
        )
    for name, value in (("path", path), ("id", id_), ("served_name", recipe.model.served_name)):
        if value is not None and not value.strip():
            yield Problem(("model", name), "is empty")
    if path is not None and recipe.model.revision is not None:
        yield Problem(("model", "revision"), "a folder has no revision", "remove it", also=(("model", "path"),))


def device_placement(recipe: Recipe) -> Iterator[Problem]:
    """Refuse parallelism, and device lists, that can fit no node."""
    if recipe.platform == "cpu" and recipe.devices_per_node:
        yield Problem(("devices_per_node",), "a CPU node has no devices", "remove it", also=(("platform",),))
    for name, role in recipe.roles():
        parallel = role.parallel
        ranks = parallel.workers
        where = (name, "parallel")
        if ranks % parallel.nodes:
            yield Problem(
                (*where, "nodes"),
                f"{parallel.product()} = {ranks} ranks cannot be spread evenly over {parallel.nodes} nodes",
                also=(where,),
                write=Line((*where, "tp"), str(-(-parallel.tp // parallel.nodes) * parallel.nodes), example=True),
            )
        if parallel.ep and parallel.tp * parallel.pcp * parallel.dp == 1:
            yield Problem(
                (*where, "ep"),
                "expert parallelism needs more than one rank",
                "raise tp or dp",
                also=(where,),
                write=Line((*where, "tp"), "2", example=True),
            )
        if role.devices is not None:
            yield from _devices(recipe, name, role.devices, role.instances, parallel)


def _devices(recipe: Recipe, name: str, devices: list[int], instances: int, parallel: Parallel) -> Iterator[Problem]:
    path = (name, "devices")
    if recipe.platform == "cpu":
        yield Problem(path, "a CPU node has no devices", "remove it", also=(("platform",),))
        return
    each = parallel.workers
    fitting = _as_many(path, instances * each, recipe.devices_per_node)
    if len(devices) != instances * each:
        yield Problem(
            path,
            f"{len(devices)} {'device' if len(devices) == 1 else 'devices'} for {instances} "
            f"{'instance' if instances == 1 else 'instances'} of {parallel.product()}: {instances * each} are needed",
            "list that many, or leave the key out",
            also=((name, "instances"), (name, "parallel")),
            write=fitting,
        )
    for device in sorted(set(devices)):
        if device < 0 or (recipe.devices_per_node and device >= recipe.devices_per_node):
            limit = recipe.devices_per_node - 1
            yield Problem(
                (*path, devices.index(device)),
                f"there is no device {device}" + (f", the last one is {limit}" if device >= 0 else ""),
                "ids begin with 0",
                also=(("devices_per_node",),) if device >= 0 else (),
                write=fitting,
            )
    per_node = max(each // parallel.nodes, 1)
    for start in range(0, len(devices), per_node):
        share = devices[start : start + per_node]
        if len(set(share)) != len(share):
            twice = next(d for d in share if share.count(d) > 1)
            yield Problem(path, f"instance {start // each} gets device {twice} twice", "name others", write=fitting)


def _as_many(path: Path, count: int, per_node: int) -> Line | None:
    """Return the first devices of a node, where so many are on one."""
    fits = count <= (per_node or count) and count <= 64
    return Line(path, str([*range(count)]), example=True) if fits else None


def shared_devices(recipe: Recipe) -> Iterator[Problem]:
    """Warn of two instances that name the same device: they need two nodes, although there is room on one. Nothing is
    said where they need several in any case."""
    needed = sum(role.instances * role.parallel.workers for _, role in recipe.roles())
    several = recipe.devices_per_node and needed > recipe.devices_per_node
    if several or (recipe.slurm.nodes or 1) > 1 or any(role.parallel.nodes > 1 for _, role in recipe.roles()):
        return
    taken: dict[int, tuple[str, Path]] = {}
    for name, role in recipe.roles():
        for position, device in enumerate(role.devices or ()):
            owner = f"{name}-{position // role.parallel.workers}"
            other, where = taken.setdefault(device, (owner, (name, "devices")))
            if other != owner:
                yield Problem(
                    (name, "devices", position),
                    f"{owner} and {other} both name device {device}: no node can hold both",
                    "give each instance devices of its own, or leave `devices` out",
                    also=(where,),
                )
                return


def version_ranges(recipe: Recipe) -> Iterator[Problem]:
    """Refuse version ranges that no version could ever be compared with."""
    for package, ranges in recipe.requires.items():
        if not all(_CLAUSE.match(clause) for clause in ranges.split(",")):
            yield Problem(
                ("requires", package),
                f'"{ranges}" is not a range of versions',
                write=Line(("requires", package), "'>=0.26,<0.34'", example=True),
            )


def restart_pauses(recipe: Recipe) -> Iterator[Problem]:
    """Refuse a pause that shrinks."""
    owners = [(name, role.restart) for name, role in recipe.roles()]
    for name, restart in [*owners, ("proxy", recipe.proxy.restart)]:
        if restart.backoff_max_seconds < restart.backoff_seconds:
            yield Problem(
                (name, "restart", "backoff_max_seconds"),
                f"{restart.backoff_max_seconds:g} is less than the first pause, {restart.backoff_seconds:g}",
                also=((name, "restart", "backoff_seconds"),),
                write=Line((name, "restart", "backoff_max_seconds"), f"{restart.backoff_seconds:g}", example=True),
            )


def development_endpoints(recipe: Recipe) -> Iterator[Problem]:
    """Warn of development endpoints that others on the network can reach."""
    if recipe.engine.cache_reset_endpoint and recipe.platform != "cpu":
        yield Problem(
            ("engine", "cache_reset_endpoint"),
            "engines offer development endpoints (pause, sleep, cache reset) that need no key",
            "turn it off for production; `verify` then cannot prove the reload from LMCache",
        )


def load_balancing(recipe: Recipe) -> Iterator[Problem]:
    """Check API servers for a part of the ranks: that there are ranks to divide, and that each server gets whole
    ones."""
    for name, role in recipe.roles():
        if role.parallel.load_balancing != "internal":
            yield from _rank_problems((name, "parallel"), role.parallel)


def _rank_problems(where: Path, parallel: Parallel) -> Iterator[Problem]:
    mode, dp, nodes = parallel.load_balancing, parallel.dp, parallel.nodes
    here: Path = (*where, "load_balancing")
    if dp == 1:
        what = f"{mode} load balancing divides data-parallel ranks, and dp is 1"
        yield Problem(here, what, "raise dp, or leave it out", also=((*where, "dp"),))
    elif dp % nodes:
        yield Problem(
            (*where, "dp"),
            f"{dp} ranks over {nodes} nodes: with {mode} load balancing every node has whole ranks",
            "use a multiple of nodes",
            also=(here, (*where, "nodes")),
            write=Line((*where, "dp"), str(-(-dp // nodes) * nodes), example=True),
        )
    elif mode == "hybrid" and nodes == 1:
        yield Problem(
            here,
            "on one node hybrid is internal: there is one API server for all ranks",
            also=((*where, "nodes"),),
            write=Line(here, "internal"),
        )
    elif mode == "hybrid" and dp == nodes:
        yield Problem(
            here,
            "each node has one rank, which vLLM takes for external load balancing",
            also=((*where, "dp"), (*where, "nodes")),
            write=Line(here, "external"),
        )


def data_parallel_caches(recipe: Recipe) -> Iterator[Problem]:
    """Refuse LMCache beside several API servers of an instance: an LMCache server counts the workers of whole
    instances, and each API server looks up for its own ranks."""
    if recipe.lmcache is None:
        return
    for name, role in recipe.roles():
        if name in recipe.lmcache.on and role.parallel.load_balancing != "internal":
            yield Problem(
                (name, "parallel", "load_balancing"),
                f"{name} attaches to LMCache, which pdserve connects to instances with one API server only",
                f"take {name} out of lmcache.on, or use internal",
                also=(("lmcache", "on"),),
            )


def context_parallel(recipe: Recipe) -> Iterator[Problem]:
    """Refuse prefill context parallelism where vLLM 0.32 does not run it. In its code: the attention of the CPU has no
    `supports_pcp`; mooncake_utils.py registers workers by their ranks of data, tensor and pipeline parallelism, so that
    the second context-parallel worker of a prefill is refused; nixl/connector.py raises."""
    for name, role, connector in roles(recipe):
        if role.parallel.pcp == 1:
            continue
        here: Path = (name, "parallel", "pcp")
        classes = class_names(connector)
        if recipe.platform == "cpu":
            yield Problem(here, "vLLM's attention on a CPU has no context parallelism", "remove it")
        if "MooncakeConnector" in classes:
            what = "Mooncake's bootstrap server knows no context-parallel workers: the second one could not register"
            yield Problem(here, what, "remove it, or use the connector nixl", also=((name, "connector"),))
        if "NixlConnector" in classes and name != "prefill":
            what = "NIXL takes context parallelism in prefills alone"
            yield Problem(here, what, "remove it", also=((name, "connector"),))


# Layouts between which a connector of vLLM 0.32 does not move KV; tensor parallelism is in connectors.py.
#
# NIXL, where decode pulls (kv_connector/v1/nixl/base_worker.py): a kv_consumer raises NotImplementedError for
# pipeline_parallel_size > 1. A decode without stages registers as many regions as the model has layers, and asserts
# "Number of KV layers must match between prefill and decode" of each stage of a prefill. Mooncake asks every stage for
# its layers.
#
# Blocks: Mooncake pairs the block ids of both sides one to one (mooncake_connector.py): with smaller blocks decode has
# more of them, and each transfer fails ("P num blocks less than D"); with larger ones it takes the last of prefill's
# for the whole prompt, and nothing notices. NIXL divides decode's blocks by prefill's
# (`TransferTopology.block_size_ratio`, and "Different local/remote block sizes are not supported when P TP > D TP"),
# but compares those of the attention backend, which may be smaller than the flag: a warning.
_BLOCK_SIZE = "block-size"


def pipeline_parallel(recipe: Recipe) -> Iterator[Problem]:
    """Refuse pipeline stages on a side of NIXL."""
    for name, role, connector in roles(recipe):
        pp = role.parallel.pp
        if pp > 1 and isinstance(first_transfer_of(connector), NixlSection):
            tp = role.parallel.tp * pp
            yield Problem(
                (name, "parallel", "pp"),
                f"{name} has {pp} pipeline stages, and NIXL moves KV between engines without stages only: "
                + ("vLLM refuses them at its start" if name == "decode" else "each transfer would fail"),
                f"write pp: 1 (with tp: {tp}, if {tp} divides the model's heads), or use mooncake on both roles",
                also=((name, "connector"),),
            )


def block_sizes(recipe: Recipe) -> Iterator[Problem]:
    """Refuse Mooncake with unequal blocks."""
    if recipe.mode == "aggregated":
        return
    (_, prefill_role, prefill), (_, decode_role, decode) = roles(recipe)
    if not isinstance(first_transfer_of(prefill), MooncakeSection) or not isinstance(
        first_transfer_of(decode), MooncakeSection
    ):
        return
    ours, theirs = args_of(recipe, decode_role).get(_BLOCK_SIZE), args_of(recipe, prefill_role).get(_BLOCK_SIZE)
    if ours == theirs:
        return
    yield Problem(
        flag_path(recipe, "decode", _BLOCK_SIZE),
        f"decode has blocks of {_size_text(ours)}, prefill of {_size_text(theirs)}: Mooncake pairs them one to "
        "one, and each transfer fails, or decode reads the KV of other tokens",
        f"set engine.args.{_BLOCK_SIZE} for both",
        also=(flag_path(recipe, "prefill", _BLOCK_SIZE),),
    )


def uneven_blocks(recipe: Recipe) -> Iterator[Problem]:
    """Warn of NIXL with blocks that vLLM may not be able to divide."""
    if recipe.mode == "aggregated":
        return
    (_, prefill_role, prefill), (_, decode_role, decode) = roles(recipe)
    if not isinstance(first_transfer_of(prefill), NixlSection) or not isinstance(
        first_transfer_of(decode), NixlSection
    ):
        return
    ours, theirs = args_of(recipe, decode_role).get(_BLOCK_SIZE), args_of(recipe, prefill_role).get(_BLOCK_SIZE)
    if not isinstance(ours, int) or not isinstance(theirs, int) or theirs < 1 or ours == theirs:
        return
    if ours % theirs:
        why = "unless its attention backend has smaller ones, decode refuses blocks that are no multiple of prefill's"
    elif prefill_role.parallel.tp > decode_role.parallel.tp:
        why = "where prefill has more tensor parallel ranks, only KV that every rank has whole (MLA) is moved between "
        why += "unequal blocks"
    else:
        return
    yield Problem(
        flag_path(recipe, "decode", _BLOCK_SIZE),
        f"decode has blocks of {ours} tokens, prefill of {theirs}: {why}",
        f"set engine.args.{_BLOCK_SIZE} for both",
        also=(flag_path(recipe, "prefill", _BLOCK_SIZE),),
    )


def _size_text(value: object) -> str:
    return "vLLM's default size" if value is None else f"{show.value(value)} tokens"
