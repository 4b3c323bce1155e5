"""What this vLLM does with KV of several groups when a connector is configured."""

from __future__ import annotations

import copy
import importlib
import json
from typing import Any

from vllm.config import CacheConfig, DeviceConfig, SchedulerConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.v1.core.sched.scheduler import Scheduler

from tests.upstream.engine_config import engine_config
from tests.upstream.scheduler_lab import Lab

LMCACHE = "lmcache.integration.vllm.lmcache_mp_connector"


def manager(**transfer: Any) -> str:
    """on, off: vLLM's hybrid KV cache manager with this connector; without one when none is named."""
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "async_scheduling": False}
    config = engine_config(
        block_size=16,
        transfer={"kv_connector": "MooncakeConnector", "kv_role": "kv_both", **transfer},
        prefix_caching=True,
        scheduler=limits,
    )
    if not transfer:
        config = VllmConfig(
            model_config=copy.deepcopy(config.model_config),
            scheduler_config=SchedulerConfig(max_model_len=4096, is_encoder_decoder=False, **limits),
            cache_config=CacheConfig(block_size=16),
            device_config=DeviceConfig("cpu"),
        )
    return "off" if config.scheduler_config.disable_hybrid_kv_cache_manager else "on"


def state_can_be_loaded() -> bool:
    """Whether the scheduler can cut a prefill of a model with recurrent state behind tokens from a connector."""
    lab = Lab(num_blocks=8)
    request = lab.add("a", 128)
    scheduler = lab.scheduler
    scheduler.cache_config.mamba_block_size = 16
    try:
        Scheduler._mamba_block_aligned_split(scheduler, request, 64, 0, 32)
    except AssertionError as error:
        if "External KV connector is not verified yet" not in str(error):
            raise
        return False
    return True


def imports(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def main() -> None:
    # Sources without a build have no platform; every platform that vLLM is built for supports groups.
    type(current_platform).support_hybrid_kv_cache = classmethod(lambda cls: True)
    print(
        json.dumps(
            {
                "no_connector": manager(),
                "lmcache_imports": imports(LMCACHE),
                "lmcache": manager(kv_connector="LMCacheMPConnector", kv_connector_module_path=LMCACHE),
                "mooncake": manager(kv_connector="MooncakeConnector"),
                "both": manager(
                    kv_connector="MultiConnector",
                    kv_connector_extra_config={
                        "connectors": [
                            {"kv_connector": "MooncakeConnector", "kv_role": "kv_producer"},
                            {
                                "kv_connector": "LMCacheMPConnector",
                                "kv_connector_module_path": LMCACHE,
                                "kv_role": "kv_both",
                            },
                        ]
                    },
                ),
                "state_can_be_loaded": state_can_be_loaded(),
            }
        )
    )


if __name__ == "__main__":
    main()
