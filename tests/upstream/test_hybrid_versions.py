"""On every supported vLLM KV of several groups survives a connector: the base of plan/model_rules.py.

That older ones lose groups, and are refused for it, is in tests/plan/test_hybrid.py. Apart from test_hybrid_groups.py,
which imports what older releases lack.
"""

from __future__ import annotations

import copy
from typing import Any

from pdserve.errors import PreflightError
from pdserve.installed.versions import Versions
from pdserve.plan.model_rules import check_kv_groups
from tests.plan.kit import on_gpus, recipe, with_lmcache
from tests.plan.test_hybrid import STATE, WINDOWS
from tests.upstream.run import IN_RELEASE, INSTALLED_LMCACHE, VLLM_VERSIONS, on

if IN_RELEASE:
    from vllm.config import CacheConfig, DeviceConfig, SchedulerConfig, VllmConfig

    from tests.upstream.engine_config import engine_config
    from tests.upstream.scheduler_lab import Lab, Scheduler

MOONCAKE = {"kv_connector": "MooncakeConnector"}
LMCACHE = {
    "kv_connector": "LMCacheMPConnector",
    "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
}
BOTH = {
    "kv_connector": "MultiConnector",
    "kv_connector_extra_config": {
        "connectors": [MOONCAKE | {"kv_role": "kv_producer"}, LMCACHE | {"kv_role": "kv_both"}]
    },
}


@on(*VLLM_VERSIONS)
def test_every_supported_pair_keeps_all_groups_and_is_taken(version: str) -> None:
    assert [each for each in ({}, MOONCAKE, LMCACHE, BOTH) if not has_hybrid_manager(each)] == []
    lab = Lab(num_blocks=8)
    scheduler, request = lab.scheduler, lab.add("a", 128)
    scheduler.cache_config.mamba_block_size = 16
    # It can cut a prefill of a model with recurrent state behind tokens from a connector, or asserts that it cannot.
    Scheduler._mamba_block_aligned_split(scheduler, request, 64, 0, 32)
    versions = Versions(vllm=version, lmcache=INSTALLED_LMCACHE)
    for config in (WINDOWS, STATE):
        try:
            list(check_kv_groups(recipe(on_gpus(), with_lmcache(transfer_mode="lmcache_driven")), config, versions))
        except PreflightError as error:
            raise AssertionError(config) from error


def has_hybrid_manager(transfer: dict[str, Any]) -> bool:
    """vLLM's hybrid KV cache manager with this connector; without one when none is named."""
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "async_scheduling": False}
    named = MOONCAKE | {"kv_role": "kv_both"} | transfer
    config = engine_config(block_size=16, transfer=named, prefix_caching=True, scheduler=limits)
    if not transfer:
        config = VllmConfig(
            model_config=copy.deepcopy(config.model_config),
            scheduler_config=SchedulerConfig(max_model_len=4096, is_encoder_decoder=False, **limits),
            cache_config=CacheConfig(block_size=16),
            device_config=DeviceConfig("cpu"),
        )
    return not config.scheduler_config.disable_hybrid_kv_cache_manager
