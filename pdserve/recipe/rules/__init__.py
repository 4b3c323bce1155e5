"""Combinations that a recipe may not have, and those that deserve a warning. One module a subject.

A rule is a generator of problems about a recipe whose single values are all valid. Rules know no nodes and no
versions: what depends on those is the planner's.
"""

from __future__ import annotations

from itertools import chain

from pdserve.recipe.load.problems import Problem
from pdserve.recipe.model import Recipe
from pdserve.recipe.rules import caches, connectors, engines, layout, nodes, proxy

_RULES = (
    layout.unused_roles,
    layout.model_source,
    layout.device_placement,
    layout.version_ranges,
    layout.restart_pauses,
    layout.load_balancing,
    layout.data_parallel_caches,
    layout.context_parallel,
    connectors.transfer_path,
    connectors.role_agreement,
    connectors.tensor_parallel,
    layout.pipeline_parallel,
    layout.block_sizes,
    connectors.repeated_children,
    connectors.raw_children,
    connectors.refused_connectors,
    connectors.moriio_acceptance,
    connectors.moriio_limits,
    connectors.moriio_proxy,
    connectors.moriio_layout,
    connectors.moriio_decode_caches,
    connectors.moriio_restarts,
    engines.weight_loading,
    engines.load_caps,
    engines.load_cap_switches,
    engines.load_timeouts,
    caches.lmcache_attachment,
    caches.lmcache_sizes,
    caches.lmcache_transfer_modes,
    caches.lmcache_order,
    caches.lmcache_prefix_caching,
    caches.lmcache_device_memory,
    caches.store_attachment,
    caches.store_master_flags,
    caches.single_cache,
    caches.store_prefix_caching,
    engines.rocm_switches,
    engines.owned_flags,
    engines.conditional_flags,
    engines.owned_variables,
    proxy.router_mode,
    proxy.router_settings,
    proxy.admission_pools,
    proxy.conditional_routing,
    proxy.kv_event_policies,
    proxy.proxy_times,
    proxy.admin_access,
    proxy.upstream_tls,
    proxy.port_clashes,
    nodes.network,
    nodes.excluded_nodes,
    nodes.agent_lease,
    nodes.slurm_job,
    nodes.container_section,
    nodes.setup_commands,
    nodes.tilde_paths,
    nodes.local_model_id,
    engines.memory_utilization,
)
_WARNINGS = (
    layout.development_endpoints,
    proxy.proxy_exposure,
    proxy.router_exposure,
    connectors.unverified_connectors,
    layout.uneven_blocks,
    caches.lmcache_leases,
    caches.registration_timeouts,
    engines.uneven_load_caps,
    engines.idle_rocm_switches,
    engines.unknown_flags,
    engines.unpinned_model,
    engines.unpinned_drafts,
    engines.lost_weights_cache,
    nodes.unused_image,
    nodes.unexpanded_setup,
    layout.shared_devices,
    nodes.unexpanded_tildes,
    engines.unknown_variables,
)


def problems(recipe: Recipe) -> list[Problem]:
    """Return everything that makes the recipe impossible."""
    return list(chain.from_iterable(rule(recipe) for rule in _RULES))


def warnings(recipe: Recipe) -> list[Problem]:
    """Return what may be meant, but has surprised people."""
    return list(chain.from_iterable(rule(recipe) for rule in _WARNINGS))
