"""Combinations that a recipe may not have, and those that deserve a warning. One module a subject.

A rule is a generator of problems about a recipe whose single values are all valid. Rules know no nodes and no
versions: what depends on those is the planner's.
"""

from __future__ import annotations

from itertools import chain

from pdserve.recipe.load.problems import Problem
from pdserve.recipe.model import Recipe
from pdserve.recipe.rules import (
    connectors,
    container,
    data_parallel,
    engines,
    layouts,
    lmcache,
    loading,
    mooncake_store,
    moriio,
    nodes,
    paths,
    ports,
    proxy,
    registration,
    rocm,
    setup,
    structure,
    vllm_router,
    weights,
)

_RULES = (
    structure.sections,
    structure.model,
    structure.placement,
    structure.versions,
    structure.restarts,
    data_parallel.balancing,
    data_parallel.caches,
    data_parallel.context,
    connectors.transfer,
    connectors.pair,
    connectors.tensor_parallel,
    layouts.pipeline_parallel,
    layouts.block_sizes,
    connectors.duplicates,
    connectors.raw_children,
    connectors.refused,
    moriio.accepted,
    moriio.limits,
    moriio.proxy,
    moriio.layout,
    moriio.alone_on_decode,
    moriio.restarts,
    loading.weights,
    loading.caps,
    loading.switches,
    loading.timeouts,
    lmcache.attachment,
    lmcache.sizes,
    lmcache.modes,
    lmcache.order,
    lmcache.caching,
    lmcache.device_memory,
    mooncake_store.attachment,
    mooncake_store.master_flags,
    mooncake_store.one_cache,
    mooncake_store.caching,
    rocm.switches,
    engines.flags,
    engines.conditional_flags,
    engines.environment,
    vllm_router.modes,
    vllm_router.settings,
    proxy.pools,
    proxy.conditions,
    proxy.events,
    proxy.times,
    proxy.admin,
    proxy.upstream_tls,
    ports.clashes,
    nodes.network,
    nodes.excluded,
    nodes.lease,
    nodes.slurm,
    container.container,
    setup.commands,
    paths.tilde,
    paths.model_id,
    engines.utilization,
)
_WARNINGS = (
    structure.exposure,
    proxy.doors,
    vllm_router.doors,
    connectors.unverified,
    layouts.uneven_blocks,
    lmcache.leases,
    registration.timeouts,
    loading.uneven_caps,
    rocm.idle_switches,
    engines.unknown_flags,
    weights.unpinned,
    weights.unpinned_drafts,
    weights.lost_cache,
    container.unused_image,
    setup.unexpanded,
    structure.shared_devices,
    paths.tilde_passed_on,
    engines.unknown_variables,
)


def problems(recipe: Recipe) -> list[Problem]:
    """Everything that makes the recipe impossible."""
    return list(chain.from_iterable(rule(recipe) for rule in _RULES))


def warnings(recipe: Recipe) -> list[Problem]:
    """What may be meant, but has surprised people."""
    return list(chain.from_iterable(rule(recipe) for rule in _WARNINGS))
