"""Sections, model, parallelism and devices."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pdserve.recipe.load.problems import Line, Path, Problem
from pdserve.recipe.model import Parallel, Recipe

_MODEL = Line(("model", "id"), "org/model", example=True)
_CLAUSE = re.compile(r"^\s*(~=|===?|!=|<=|>=|<|>)\s*[0-9A-Za-z][0-9A-Za-z.*+!_-]*\s*$")


def sections(recipe: Recipe) -> Iterator[Problem]:
    """A role section that the mode does not use would be ignored without a word."""
    unused = ("prefill", "decode") if recipe.mode == "aggregated" else ("aggregated",)
    for name in unused:
        if getattr(recipe, name) is not None:
            yield Problem(
                (name,),
                f"mode {recipe.mode} has no role {name}",
                "remove the section, or change the mode",
                also=(("mode",),),
            )


def model(recipe: Recipe) -> Iterator[Problem]:
    """Exactly one of path and id."""
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


def placement(recipe: Recipe) -> Iterator[Problem]:
    """Parallelism, and device lists that can fit no node."""
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
    """The first devices of a node, where so many are on one."""
    fits = count <= (per_node or count) and count <= 64
    return Line(path, str([*range(count)]), example=True) if fits else None


def shared_devices(recipe: Recipe) -> Iterator[Problem]:
    """Two instances that name the same device need two nodes, although there is room on one. Not where they need
    several in any case."""
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


def versions(recipe: Recipe) -> Iterator[Problem]:
    """Version ranges that no version could ever be compared with."""
    for package, ranges in recipe.requires.items():
        if not all(_CLAUSE.match(clause) for clause in ranges.split(",")):
            yield Problem(
                ("requires", package),
                f'"{ranges}" is not a range of versions',
                write=Line(("requires", package), "'>=0.26,<0.34'", example=True),
            )


def restarts(recipe: Recipe) -> Iterator[Problem]:
    """A pause that shrinks."""
    owners = [(name, role.restart) for name, role in recipe.roles()]
    for name, restart in [*owners, ("proxy", recipe.proxy.restart)]:
        if restart.backoff_max_seconds < restart.backoff_seconds:
            yield Problem(
                (name, "restart", "backoff_max_seconds"),
                f"{restart.backoff_max_seconds:g} is less than the first pause, {restart.backoff_seconds:g}",
                also=((name, "restart", "backoff_seconds"),),
                write=Line((name, "restart", "backoff_max_seconds"), f"{restart.backoff_seconds:g}", example=True),
            )


def exposure(recipe: Recipe) -> Iterator[Problem]:
    """What others on the network can reach."""
    if recipe.engine.cache_reset_endpoint and recipe.platform != "cpu":
        yield Problem(
            ("engine", "cache_reset_endpoint"),
            "engines offer development endpoints (pause, sleep, cache reset) that need no key",
            "turn it off for production; `verify` then cannot prove the reload from LMCache",
        )
