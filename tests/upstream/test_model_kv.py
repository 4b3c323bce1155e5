"""Blocks of tiny models: the installed vLLM computes what is recorded.

vLLM's own classes build each model on the meta device (shapes without storage), so nothing is loaded and no engine
runs.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from tests.models.tiny_configs import TINY, Tiny
from tests.upstream.run import IN_RELEASE, INSTALLED_VLLM, on

if IN_RELEASE:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
        parallel_state,
    )
    from vllm.distributed.utils import get_pp_indices
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import registry
    from vllm.model_executor.models.utils import extract_layer_index
    from vllm.platforms import current_platform
    from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity, get_kv_cache_configs
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

RECURRENT = ("granite-mamba2", "nemotron-mamba2", "jamba-mamba1", "qwen3-next")
RECORD = Path(__file__).parents[1] / "models" / "recorded_vllm.json"
_RAISED = (ValueError, TypeError, AttributeError, AssertionError, RuntimeError, KeyError, ImportError)
"""What a class of a model may end with that cannot be built here."""


def configured(tiny: Tiny, folder: str) -> Any:
    Path(folder, "config.json").write_text(json.dumps(tiny.config))
    flags = {flag.replace("-", "_"): value for flag, value in tiny.args.items()}
    if "kv_lora_rank" in tiny.config:
        # What a CPU without AMX has anyway. The backend of a CPU with AMX has other blocks: platforms/cpu.py.
        flags["attention_backend"] = "CPU_MLA"
    args = EngineArgs(
        model=folder,
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        tensor_parallel_size=tiny.tp,
        pipeline_parallel_size=tiny.pp,
        **flags,
    )
    return args.create_engine_config()


def by_stage(specs: dict[str, Any], tiny: Tiny) -> list[dict[str, Any]]:
    """The specs of each pipeline stage, cut where vLLM cuts. Models that draft are on one stage here."""
    if tiny.pp == 1:
        return [specs]
    bounds = [get_pp_indices(tiny.config["num_hidden_layers"], stage, tiny.pp) for stage in range(tiny.pp)]
    return [
        {name: spec for name, spec in specs.items() if first <= extract_layer_index(name) < last}
        for first, last in bounds
    ]


def look(tiny: Tiny, store: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        config = configured(tiny, folder)
        with set_current_vllm_config(config):
            if not torch.distributed.is_initialized():
                init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
            destroy_model_parallel()  # only a model with experts gets a group for them
            initialize_model_parallel(1, 1)
            parallel_state.get_tp_group().world_size = tiny.tp  # layers only ask for the number
            torch.set_default_dtype(torch.bfloat16)
            with torch.device("meta"):
                initialize_model(vllm_config=config)
                if (drafting := config.speculative_config) is not None:
                    initialize_model(vllm_config=config, model_config=drafting.draft_model_config)
        current_platform.update_block_size_for_backend(config)
        specs = get_kv_cache_spec(config)
        config.cache_config.kv_cache_layout = "LBHNC"
        stages = get_kv_cache_configs(config, by_stage(specs, tiny), [tiny.kv_bytes] * tiny.pp)
        made = max(stages, key=lambda stage: stage.kv_cache_tensors[0].size)
        tokens, concurrency = get_kv_cache_capacity(config, made)
        return {
            "block_size": config.cache_config.block_size,
            "num_blocks": made.num_blocks,
            "groups": [
                {
                    "spec": type(group.kv_cache_spec).__name__,
                    "layers": sum(len(stage.kv_cache_groups[number].layer_names) for stage in stages),
                    "block": group.kv_cache_spec.block_size,
                    "page_bytes": group.kv_cache_spec.page_size_bytes,
                }
                for number, group in enumerate(made.kv_cache_groups)
            ],
            "bytes_a_block": sum(tensor.size for tensor in made.kv_cache_tensors[:1]) // made.num_blocks,
            "concurrency": concurrency,
            "tokens": tokens,
            "max_in_flight_tokens": config.max_in_flight_tokens,
            "ssm_dtype": config.cache_config.mamba_ssm_cache_dtype,
        }


@on(INSTALLED_VLLM)
def test_the_record_is_what_vllm_computes() -> None:
    """A CPU without AVX-512 BF16 has another type of recurrent state, and models with it then have other blocks: there
    the others are compared."""
    # vLLM looks at each class in a process of its own, which imports everything again.
    registry._run_in_subprocess = lambda look_at: look_at()
    theirs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for tiny in TINY:
            try:
                theirs[tiny.name] = look(tiny, Path(folder, "store"))
            except _RAISED as error:
                theirs[tiny.name] = {"error": f"{type(error).__name__}: {error}"}
    record: dict[str, Any] = json.loads(RECORD.read_text())
    assert theirs.keys() == record.keys()
    if any(numbers["ssm_dtype"] != "float32" for numbers in theirs.values()):
        theirs, record = (_without_recurrent_state(numbers) for numbers in (theirs, record))
    assert theirs == record


def _without_recurrent_state(models: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {key: value for key, value in numbers.items() if key != "ssm_dtype"}
        for name, numbers in models.items()
        if not name.startswith(RECURRENT)
    }
