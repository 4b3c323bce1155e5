"""Data-parallel load balancing, and context parallelism of prefills."""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.recipe.connectors.registry import class_names
from pdserve.recipe.effective import roles
from pdserve.recipe.load.problems import Line, Path, Problem
from pdserve.recipe.model import Parallel, Recipe


def balancing(recipe: Recipe) -> Iterator[Problem]:
    """API servers for a part of the ranks: that there are ranks to divide, and that each server gets whole ones."""
    for name, role in recipe.roles():
        if role.parallel.load_balancing != "internal":
            yield from _divided((name, "parallel"), role.parallel)


def _divided(where: Path, parallel: Parallel) -> Iterator[Problem]:
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


def caches(recipe: Recipe) -> Iterator[Problem]:
    """An LMCache server counts the workers of whole instances, and each API server looks up for its own ranks."""
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


def context(recipe: Recipe) -> Iterator[Problem]:
    """Where vLLM 0.32 does not run prefill context parallelism. In its code: the attention of the CPU has no
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
