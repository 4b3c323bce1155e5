"""Configuration of an engine that never runs: what a Scheduler is built from."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import vllm.platforms
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.model_executor.models import registry
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec, SlidingWindowSpec

ROOT = Path(__file__).parents[2]
MODEL = ROOT / ".cache" / "tiny-model"
MAX_MODEL_LEN = 4096
LAYER = "layers.0.full"


@cache
def tiny_model() -> Any:
    """The ModelConfig of a model that is written when it is missing."""
    if not (MODEL / "config.json").exists():
        subprocess.run([sys.executable, str(ROOT / "scripts" / "tiny_model.py")], check=True, stdout=subprocess.DEVNULL)
    # vLLM looks at its class in a process of its own, which imports everything again.
    with mock.patch.object(registry, "_run_in_subprocess", lambda look_at: look_at()):
        return ModelConfig(
            model=str(MODEL), tokenizer=str(MODEL), dtype="bfloat16", seed=42, max_model_len=MAX_MODEL_LEN
        )


def engine_config(
    *, block_size: int, transfer: Mapping[str, Any], prefix_caching: bool, scheduler: Mapping[str, Any]
) -> Any:
    cache = CacheConfig(
        block_size=block_size, gpu_memory_utilization=0.9, cache_dtype="auto", enable_prefix_caching=prefix_caching
    )
    if "kv_cache_layout" in {each.name for each in fields(CacheConfig)}:
        cache.kv_cache_layout = "LBNHC"  # a platform's worker would choose it
    return VllmConfig(
        model_config=copy.deepcopy(tiny_model()),
        scheduler_config=SchedulerConfig(
            max_model_len=MAX_MODEL_LEN, enable_chunked_prefill=True, is_encoder_decoder=False, **scheduler
        ),
        cache_config=cache,
        kv_transfer_config=KVTransferConfig(**transfer),
        device_config=DeviceConfig("cpu"),
    )


def kv_cache_config(
    num_blocks: int, block_size: int, sliding_window: int | None, *, recurrent_state: bool = False
) -> Any:
    """A KVCacheConfig of a group with full attention, one of that window in tokens unless it is None, and one of
    recurrent state, of which the last one at the end of a block is kept."""
    common: dict[str, Any] = {"block_size": block_size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    groups = [KVCacheGroupSpec([LAYER], FullAttentionSpec(**common))]
    if sliding_window is not None:
        groups.append(
            KVCacheGroupSpec(["layers.1.sliding"], SlidingWindowSpec(**common, sliding_window=sliding_window))
        )
    if recurrent_state:
        state = MambaSpec(
            block_size=block_size,
            shapes=((1, 1),),
            dtypes=(torch.float32,),
            mamba_cache_mode="align",
        )
        groups.append(KVCacheGroupSpec(["layers.2.state"], state))
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def _be_on_a_cpu() -> None:
    """Upstream looks for "cpu" in the version of an installed vllm; sources on the path have none."""
    platform = vllm.platforms.current_platform
    if platform.is_cpu():
        return
    vllm.platforms._current_platform = CpuPlatform()
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and vars(module).get("current_platform") is platform:
            module.current_platform = vllm.platforms._current_platform  # type: ignore[attr-defined]


_be_on_a_cpu()
