"""KV of several groups: it survives a connector on every supported vLLM, which plan/model_rules.py rests on. And stores
and geometry of the installed LMCache and vLLM, with our planner beside them."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from pdserve.errors import PreflightError
from pdserve.installed.versions import Versions
from pdserve.models.kv_cache import TableGroup, can_store, lmcache_refusal, offloading_refusal, scheduler_block
from pdserve.models.layers import hints_of
from pdserve.plan.model_rules import check_kv_groups
from tests.models.families import FAMILIES
from tests.plan.kit import on_gpus, recipe, with_lmcache
from tests.plan.test_hybrid import STATE, WINDOWS
from tests.upstream.run import IN_RELEASE, INSTALLED_LMCACHE, INSTALLED_VLLM, VLLM_VERSIONS, all_hold, on

if IN_RELEASE:
    from tests.upstream.engine_config import engine_config
    from tests.upstream.scheduler_lab import Lab, Scheduler
if IN_RELEASE == INSTALLED_VLLM:
    import torch
    from lmcache.integration.vllm.kv_cache_group_edits import validate_kv_cache_groups
    from lmcache.integration.vllm.lmcache_mp_connector import (
        get_group_tokens_per_block,
        get_vllm_scheduler_block_size,
        validate_mamba_step_alignment,
    )
    from lmcache.integration.vllm.lmcache_mp_metadata import (
        LMCacheMPRequestMetadata,
        LMCacheMPRequestTracker,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
    from vllm.model_executor.models.interfaces import has_inner_state, is_hybrid
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec


taken: dict[str, Counter[bool]] = {"lmcache": Counter(), "offloading": Counter()}
"""By whose verdict: how often groups were taken, and how often refused."""

QUICK = settings(max_examples=250, deadline=None, database=None, suppress_health_check=list(HealthCheck))
sizes = st.lists(st.sampled_from((1, 2, 4, 8, 16, 32, 64, 96, 128, 256, 1056)), min_size=1, max_size=5)


def tracker_of(blocks: dict[int, list[int]], prompt: int) -> Any:
    request = SimpleNamespace(
        request_id="r",
        cache_salt=None,
        all_token_ids=list(range(prompt)),
        prompt_token_ids=list(range(prompt)),
        num_prompt_tokens=prompt,
        kv_transfer_params=None,
        sampling_params=None,
        mm_features=[],
    )
    tracker = LMCacheMPRequestTracker(request)
    tracker.allocated_block_ids = blocks
    tracker.num_scheduled_tokens, tracker.num_stored_tokens = prompt, 0
    return tracker


def allocated(group_sizes: list[int], tokens: int) -> dict[int, list[int]]:
    """Block ids of every group for so many tokens; the id tells group and position."""
    return {
        group: [1_000_000 * (group + 1) + index for index in range(math.ceil(tokens / size))]
        for group, size in enumerate(group_sizes)
    }


def spec_of(group: TableGroup) -> Any:
    if group.kind == "recurrent":
        return MambaSpec(block_size=group.block, shapes=((1, 1),), dtypes=(torch.float32,), mamba_cache_mode=group.mode)
    return FullAttentionSpec(block_size=group.block, num_kv_heads=1, head_size=1, dtype=torch.float32)


def configs_of(groups: list[TableGroup], dcp: int, batched: int, extra: dict[str, Any]) -> tuple[Any, Any]:
    """Return what vLLM hands to connectors, reduced to what geometry is made of."""
    align = any(group.kind == "recurrent" and group.mode == "align" for group in groups)
    parallel = SimpleNamespace(
        decode_context_parallel_size=dcp,
        prefill_context_parallel_size=1,
        tensor_parallel_size=dcp,
        pipeline_parallel_size=1,
        data_parallel_size=1,
        data_parallel_index=0,
        data_parallel_rank_local=0,
        world_size=dcp,
        rank=0,
        nnodes_within_dp=1,
        distributed_executor_backend="mp",
    )
    vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(
            block_size=groups[0].block,
            mamba_cache_mode="align" if align else "none",
            prefix_match_unit=None,
            enable_prefix_caching=True,
            cache_dtype="auto",
            kv_cache_layout=None,
        ),
        parallel_config=parallel,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=batched),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra, engine_id="e"),
        model_config=SimpleNamespace(use_mla=False, dtype=torch.float32, model="m", get_total_num_kv_heads=lambda: 1),
        kv_events_config=None,
        use_v2_model_runner=True,
        speculative_config=None,
    )
    kv_cache_config = KVCacheConfig(
        num_blocks=0,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layer{i}"], spec_of(group)) for i, group in enumerate(groups)],
    )
    return vllm_config, kv_cache_config


@st.composite
def groups_of_a_model(draw: st.DrawFn) -> list[TableGroup]:
    attention = [TableGroup(size) for size in draw(st.lists(st.sampled_from((16, 32, 48, 64, 256)), max_size=3))]
    # One mode for all of a model: --mamba-cache-mode.
    mode: Any = draw(st.sampled_from(("none", "align", "all")))
    recurrent = [
        TableGroup(size, "recurrent", mode) for size in draw(st.lists(st.sampled_from((16, 32, 528)), max_size=2))
    ]
    assume(attention or recurrent)
    return [*attention, *recurrent]


@QUICK
@given(
    groups=groups_of_a_model(),
    chunk=st.sampled_from((16, 64, 96, 256, 528, 1056, 2112, 4224, 8448)),
    batched=st.sampled_from((8, 64, 528, 8192)),
    dcp=st.sampled_from((1, 2)),
)
def our_verdict_is_lmcaches(groups: list[TableGroup], chunk: int, batched: int, dcp: int) -> None:
    vllm_config, kv_cache_config = configs_of(groups, dcp, batched, {})
    try:
        validate_mamba_step_alignment(vllm_config, kv_cache_config)
        validate_kv_cache_groups(kv_cache_config)
        block = get_vllm_scheduler_block_size(vllm_config, kv_cache_config)
        # As both adapters do once they know the server's chunk.
        accepted = chunk % block == 0
    except ValueError:
        accepted = False
    assert (lmcache_refusal(groups, chunk, dcp=dcp, max_batched_tokens=batched) is None) == accepted
    taken["lmcache"][accepted] += 1


@QUICK
@given(groups=groups_of_a_model(), dcp=st.sampled_from((1, 2)))
def our_block_is_the_schedulers(groups: list[TableGroup], dcp: int) -> None:
    vllm_config, kv_cache_config = configs_of(groups, dcp, 8192, {})
    assert get_group_tokens_per_block(vllm_config, kv_cache_config) == [group.span(dcp) for group in groups]
    assert get_vllm_scheduler_block_size(vllm_config, kv_cache_config) == scheduler_block(groups, dcp)
    assert resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[0] == scheduler_block(groups, dcp)


@QUICK
@given(
    attention=st.lists(st.sampled_from((16, 32, 48, 64, 256)), min_size=1, max_size=3),
    block_size=st.none() | st.sampled_from((16, 40, 64, 96, 256, 512)),
    dcp=st.sampled_from((1, 2)),
)
def our_verdict_is_vllms_offloading(attention: list[int], block_size: int | None, dcp: int) -> None:
    groups = [TableGroup(size) for size in attention]
    extra = {} if block_size is None else {"block_size": block_size}
    try:
        build_offloading_config(*configs_of(groups, dcp, 8192, extra))
        accepted = True
    except (ValueError, AssertionError):
        accepted = False
    assert (offloading_refusal(groups, block_size, dcp=dcp) is None) == accepted
    taken["offloading"][accepted] += 1


@QUICK
@given(group_sizes=sizes, multiple=st.integers(1, 3), slack=st.integers(-40, 40))
def a_prompt_that_fills_no_chunk_is_never_stored(group_sizes: list[int], multiple: int, slack: int) -> None:
    """One that does is sliced by tokens, whatever the sizes of blocks; and not stored in half."""
    chunk = math.lcm(*group_sizes) * multiple
    prompt = max(1, chunk + slack)
    blocks = allocated(group_sizes, prompt)
    made = LMCacheMPRequestMetadata.GetStoreMetadata(tracker_of(blocks, prompt), chunk, group_sizes)
    assert (made is not None) == can_store(chunk, prompt)
    if made is not None:
        stored = [list(ids) for ids in made.op.block_ids]
        assert stored == [blocks[group][: made.op.end // size] for group, size in enumerate(group_sizes)]
        del blocks[0]
        assert LMCacheMPRequestMetadata.GetStoreMetadata(tracker_of(blocks, prompt), chunk, group_sizes) is None


@on(INSTALLED_VLLM)
def test_our_planner_predicts_what_the_installed_code_does() -> None:
    all_hold(
        our_block_is_the_schedulers,
        our_verdict_is_lmcaches,
        our_verdict_is_vllms_offloading,
        a_prompt_that_fills_no_chunk_is_never_stored,
    )
    for verdicts in taken.values():
        assert min(verdicts[True], verdicts[False]) > 10, "both were among the compared"


@on(INSTALLED_VLLM)
def test_vllms_classes_keep_state_exactly_where_the_config_is_read_to_say_so() -> None:
    theirs, ours = {}, {}
    for family in FAMILIES:
        registered = ModelRegistry.models.get(family.architecture)
        # Multimodal classes need torchvision, which the CPU stack cannot have.
        if registered is not None and not family.architecture.endswith("ForConditionalGeneration"):
            cls = registered.load_model_cls()
            # Mamba alone has state and no attention beside it.
            theirs[family.architecture] = bool(is_hybrid(cls) or has_inner_state(cls))
            ours[family.architecture] = hints_of(family.config).recurrent
    assert theirs == ours
    assert len(theirs) >= 15


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
    assert [each for each in (MOONCAKE, LMCACHE, BOTH) if not has_hybrid_manager(each)] == []
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
    """vLLM's hybrid KV cache manager with this connector."""
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "async_scheduling": False}
    named = {"kv_role": "kv_both"} | transfer
    config = engine_config(block_size=16, transfer=named, prefix_caching=True, scheduler=limits)
    return not config.scheduler_config.disable_hybrid_kv_cache_manager
