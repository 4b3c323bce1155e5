"""KV of several groups in the installed LMCache and vLLM: slices, stores and geometry, and our planner beside them."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from pdserve.models.kv_cache import TableGroup, can_store, lmcache_refusal, offloading_refusal, scheduler_block
from pdserve.models.layers import hints_of
from tests.models.families import FAMILIES
from tests.upstream.run import IN_RELEASE, INSTALLED_VLLM, all_hold, on

if IN_RELEASE:
    import torch
    from lmcache.integration.vllm.kv_cache_group_edits import validate_kv_cache_groups
    from lmcache.integration.vllm.lmcache_mp_connector import (
        get_group_tokens_per_block,
        get_vllm_scheduler_block_size,
        validate_mamba_step_alignment,
    )
    from lmcache.integration.vllm.lmcache_mp_metadata import (
        LMCacheMPRequestMetadata,
        LMCacheMPRequestState,
        LMCacheMPRequestTracker,
    )
    from lmcache.v1.multiprocess.group_view import EngineGroupInfo, slice_block_ids_per_group
    from lmcache.v1.multiprocess.transfer_context.worker_transfer import EngineDrivenTransferContext
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
    from vllm.model_executor.models.interfaces import has_inner_state, is_hybrid
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec


taken: dict[str, Counter[bool]] = {"lmcache": Counter(), "offloading": Counter()}
"""By whose verdict: how often groups were taken, and how often refused."""

QUICK = settings(max_examples=250, deadline=None, database=None, suppress_health_check=list(HealthCheck))
sizes = st.lists(st.sampled_from((1, 2, 4, 8, 16, 32, 64, 96, 128, 256, 1056)), min_size=1, max_size=5)


def tracker_of(blocks: dict[int, list[int]], prompt: int, *, scheduled: int, stored: int = 0) -> Any:
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
    tracker.num_scheduled_tokens, tracker.num_stored_tokens = scheduled, stored
    return tracker


def allocated(group_sizes: list[int], tokens: int) -> dict[int, list[int]]:
    """Block ids of every group for so many tokens; the id tells group and position."""
    return {
        group: [1_000_000 * (group + 1) + index for index in range(math.ceil(tokens / size))]
        for group, size in enumerate(group_sizes)
    }


@QUICK
@given(group_sizes=sizes, start=st.integers(0, 8), length=st.integers(1, 8))
def slices_are_the_blocks_of_the_range(group_sizes: list[int], start: int, length: int) -> None:
    unit = math.lcm(*group_sizes)
    first, last = start * unit, (start + length) * unit
    blocks = allocated(group_sizes, last)
    slices = slice_block_ids_per_group(blocks, group_sizes, first, last)
    assert [len(ids) for ids in slices] == [(last - first) // size for size in group_sizes]
    for group, size in enumerate(group_sizes):
        assert slices[group] == blocks[group][first // size : last // size]


@QUICK
@given(group_sizes=sizes, first=st.integers(0, 2000), length=st.integers(1, 2000))
def a_range_that_cuts_a_block_is_refused(group_sizes: list[int], first: int, length: int) -> None:
    assume(any(first % size or (first + length) % size for size in group_sizes))
    with pytest.raises(ValueError):  # noqa: PT011
        slice_block_ids_per_group(allocated(group_sizes, first + length), group_sizes, first, first + length)


@QUICK
@given(
    group_sizes=sizes,
    chunks=st.integers(1, 6),
    multiple=st.integers(1, 3),
    tail=st.integers(0, 100),
    missing=st.data(),
)
def a_missing_group_stores_nothing(
    group_sizes: list[int], chunks: int, multiple: int, tail: int, missing: st.DataObject
) -> None:
    chunk = math.lcm(*group_sizes) * multiple
    prompt = chunk * chunks + tail
    blocks = allocated(group_sizes, prompt)
    del blocks[missing.draw(st.sampled_from(sorted(blocks)))]
    tracker = tracker_of(blocks, prompt, scheduled=prompt)
    assert LMCacheMPRequestMetadata.GetStoreMetadata(tracker, chunk, group_sizes) is None
    assert tracker.num_stored_tokens == 0


@QUICK
@given(group_sizes=sizes, prompt=st.integers(1, 6000), multiple=st.integers(1, 3), short=st.data())
def a_store_never_reaches_beyond_the_group_that_covers_least(
    group_sizes: list[int], prompt: int, multiple: int, short: st.DataObject
) -> None:
    chunk = math.lcm(*group_sizes) * multiple
    blocks = {
        group: ids[: short.draw(st.integers(0, len(ids)))] for group, ids in allocated(group_sizes, prompt).items()
    }
    covered = min(len(blocks[group]) * size for group, size in enumerate(group_sizes))
    made = LMCacheMPRequestMetadata.GetStoreMetadata(tracker_of(blocks, prompt, scheduled=prompt), chunk, group_sizes)
    expected = min(covered, prompt) // chunk * chunk
    assert (0 if made is None else made.op.end) == expected
    if made is not None:
        assert [len(ids) for ids in made.op.block_ids] == [expected // size for size in group_sizes]


def a_load_is_not_guarded_against_a_missing_group() -> None:
    """GetRetrieveMetadata does not look: upstream relies on vLLM, which gives the connector that loads the blocks of
    every group."""
    tracker = tracker_of({0: [1, 2, 3, 4]}, 300, scheduled=0)
    tracker.num_lmcache_hit_tokens = 256
    tracker.state = LMCacheMPRequestState.WAITING_FOR_LOAD
    made = LMCacheMPRequestMetadata.GetRetrieveMetadata(tracker, 256, [64, 128])
    assert [list(ids) for ids in made.op.block_ids] == [[1, 2, 3, 4], []]


def engine_driven_transfer_takes_one_group() -> None:
    assert [engine_driven_takes(groups) for groups in (1, 2)] == [True, False]


def engine_driven_takes(groups: int) -> bool:
    """Tell whether the transfer that `auto` means on a CPU gets beyond its check of the groups at registration."""
    infos = [EngineGroupInfo(engine_group_id=index, layer_indices=(index,)) for index in range(groups)]
    context = EngineDrivenTransferContext.__new__(EngineDrivenTransferContext)
    try:
        context.register({}, "m", 1, 1, 1.0, engine_group_infos=infos)
    except ValueError as error:
        return "multiple KV transfer groups" not in str(error)
    except (AttributeError, IndexError, StopIteration):
        pass  # beyond the check it needs real tensors and a server
    return True


def published_store(sizes: list[int], present: list[int], tokens: int, chunk: int, engine_block: int) -> list[int]:
    """How many block ids of each group the published rule sends for the chunks that it would store: a block of a group
    is so many blocks of cache_config.block_size, or so many fit into one; a group without blocks is not looked at."""
    lengths = {group: tokens // sizes[group] for group in present}
    bound = min(length * sizes[group] // engine_block for group, length in lengths.items())
    end = bound * engine_block // chunk * chunk // engine_block
    lasts = [end // (size // engine_block) if size >= engine_block else end * (engine_block // size) for size in sizes]
    return [min(last, lengths.get(group, 0)) for group, last in enumerate(lasts)]


def the_published_rule() -> None:
    """It agrees where every group has blocks and sizes divide. It stores half of a chunk when a group has no blocks:
    it bounds the store by the groups that have blocks, so the missing one gets no id and the others get theirs. And it
    cuts short where a chunk is no multiple of a block: 256 tokens are four blocks of 64 and, to it, two of 96."""
    v4 = [256, 64, 64, 4, 8]
    blocks = allocated(v4, 4096)
    installed = [len(ids) for ids in slice_block_ids_per_group(blocks, v4, 0, 4096)]
    assert published_store(v4, [0, 1, 2, 3, 4], 4096, 1024, 4) == installed == [16, 64, 64, 1024, 512]
    del blocks[0]
    assert published_store(v4, [1, 2, 3, 4], 4096, 1024, 4) == [0, 64, 64, 1024, 512]
    tracker = tracker_of(blocks, 4096, scheduled=4096)
    assert LMCacheMPRequestMetadata.GetStoreMetadata(tracker, 1024, v4) is None
    assert published_store([96, 64], [0, 1], 512, 256, 32) == [2, 4]
    with pytest.raises(ValueError):  # noqa: PT011
        slice_block_ids_per_group(allocated([96, 64], 4096), [96, 64], 0, 256)


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
    chunk = math.lcm(*group_sizes) * multiple
    prompt = max(1, chunk + slack)
    tracker = tracker_of(allocated(group_sizes, prompt), prompt, scheduled=prompt)
    stored = LMCacheMPRequestMetadata.GetStoreMetadata(tracker, chunk, group_sizes) is not None
    assert stored == can_store(chunk, prompt)


@on(INSTALLED_VLLM)
def test_lmcache_slices_and_stores_by_tokens_over_every_group() -> None:
    all_hold(
        slices_are_the_blocks_of_the_range,
        a_range_that_cuts_a_block_is_refused,
        a_missing_group_stores_nothing,
        a_store_never_reaches_beyond_the_group_that_covers_least,
        a_load_is_not_guarded_against_a_missing_group,
        engine_driven_transfer_takes_one_group,
        the_published_rule,
    )


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
