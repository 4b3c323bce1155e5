"""LMCache's per-group slices, its stores and its geometry, against properties and against our planner.

Prints one JSON object; a property that does not hold ends the process with hypothesis' counterexample.
"""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
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
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec

from pdserve.plan.engines.kv_groups import Group, can_store, lmcache_refusal, offloading_refusal, scheduler_block

QUICK = settings(max_examples=250, deadline=None, database=None, suppress_health_check=list(HealthCheck))
sizes = st.lists(st.sampled_from((1, 2, 4, 8, 16, 32, 64, 96, 128, 256, 1056)), min_size=1, max_size=5)


# The rule of slices and stores.


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
    try:
        slice_block_ids_per_group(allocated(group_sizes, first + length), group_sizes, first, first + length)
    except ValueError:
        return
    raise AssertionError("a cut block was sliced")


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


def a_load_with_a_missing_group() -> list[list[int]] | None:
    """What LMCache would load when a group has no blocks: GetRetrieveMetadata does not look."""
    tracker = tracker_of({0: [1, 2, 3, 4]}, 300, scheduled=0)
    tracker.num_lmcache_hit_tokens = 256
    tracker.state = LMCacheMPRequestState.WAITING_FOR_LOAD
    made = LMCacheMPRequestMetadata.GetRetrieveMetadata(tracker, 256, [64, 128])
    return None if made is None else [list(ids) for ids in made.op.block_ids]


def engine_driven_takes(groups: int) -> bool:
    """Whether the transfer that `auto` means on a CPU gets beyond its check of the groups at registration."""
    infos = [EngineGroupInfo(engine_group_id=index, layer_indices=(index,)) for index in range(groups)]
    context = EngineDrivenTransferContext.__new__(EngineDrivenTransferContext)
    try:
        context.register({}, "m", 1, 1, 1.0, engine_group_infos=infos)
    except ValueError as error:
        return "multiple KV transfer groups" not in str(error)
    except (AttributeError, IndexError, StopIteration):
        pass  # beyond the check it needs real tensors and a server
    return True


# The published rule: a block of a group is so many blocks of cache_config.block_size, or so many fit into one.


def published_range(engine_block: int, size: int, start: int, end: int) -> tuple[int, int]:
    if size >= engine_block:
        return start // (size // engine_block), end // (size // engine_block)
    return start * (engine_block // size), end * (engine_block // size)


def published_bound(lengths: dict[int, int], group_sizes: list[int], engine_block: int) -> int:
    """Counted over the groups that have blocks; one without any is not looked at."""
    return min((length * group_sizes[group] // engine_block for group, length in lengths.items()), default=0)


def published_store(
    group_sizes: list[int], present: list[int], tokens: int, chunk: int, engine_block: int
) -> list[int]:
    """How many block ids of each group the published rule sends for the chunks that it would store."""
    lengths = {group: tokens // group_sizes[group] for group in present}
    end = published_bound(lengths, group_sizes, engine_block) * engine_block // chunk * chunk // engine_block
    counts = []
    for group, size in enumerate(group_sizes):
        first, last = published_range(engine_block, size, 0, end)
        counts.append(min(last, lengths.get(group, 0)) - first)
    return counts


# The geometry: our planner and the code of vLLM and LMCache.


def spec_of(group: Group) -> Any:
    if group.kind == "recurrent":
        return MambaSpec(block_size=group.block, shapes=((1, 1),), dtypes=(torch.float32,), mamba_cache_mode=group.mode)
    return FullAttentionSpec(block_size=group.block, num_kv_heads=1, head_size=1, dtype=torch.float32)


def configs_of(groups: list[Group], dcp: int, batched: int, extra: dict[str, Any]) -> tuple[Any, Any]:
    """What vLLM hands to connectors, reduced to what geometry is made of."""
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
def groups_of_a_model(draw: st.DrawFn) -> list[Group]:
    attention = [Group(size) for size in draw(st.lists(st.sampled_from((16, 32, 48, 64, 256)), max_size=3))]
    # One mode for all of a model: --mamba-cache-mode.
    mode: Any = draw(st.sampled_from(("none", "align", "all")))
    recurrent = [Group(size, "recurrent", mode) for size in draw(st.lists(st.sampled_from((16, 32, 528)), max_size=2))]
    assume(attention or recurrent)
    return [*attention, *recurrent]


@QUICK
@given(
    groups=groups_of_a_model(),
    chunk=st.sampled_from((16, 64, 96, 256, 528, 1056, 2112, 4224, 8448)),
    batched=st.sampled_from((8, 64, 528, 8192)),
    dcp=st.sampled_from((1, 2)),
)
def our_verdict_is_lmcaches(groups: list[Group], chunk: int, batched: int, dcp: int) -> None:
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
    verdicts["taken" if accepted else "refused"] += 1


@QUICK
@given(groups=groups_of_a_model(), dcp=st.sampled_from((1, 2)))
def our_block_is_the_schedulers(groups: list[Group], dcp: int) -> None:
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
    groups = [Group(size) for size in attention]
    extra = {} if block_size is None else {"block_size": block_size}
    try:
        build_offloading_config(*configs_of(groups, dcp, 8192, extra))
        accepted = True
    except (ValueError, AssertionError):
        accepted = False
    assert (offloading_refusal(groups, block_size, dcp=dcp) is None) == accepted
    offloading["taken" if accepted else "refused"] += 1


@QUICK
@given(group_sizes=sizes, multiple=st.integers(1, 3), slack=st.integers(-40, 40))
def a_prompt_that_fills_no_chunk_is_never_stored(group_sizes: list[int], multiple: int, slack: int) -> None:
    chunk = math.lcm(*group_sizes) * multiple
    prompt = max(1, chunk + slack)
    tracker = tracker_of(allocated(group_sizes, prompt), prompt, scheduled=prompt)
    stored = LMCacheMPRequestMetadata.GetStoreMetadata(tracker, chunk, group_sizes) is not None
    assert stored == can_store(chunk, prompt)


verdicts = {"taken": 0, "refused": 0}
offloading = {"taken": 0, "refused": 0}
PROPERTIES = (
    slices_are_the_blocks_of_the_range,
    a_range_that_cuts_a_block_is_refused,
    a_missing_group_stores_nothing,
    a_store_never_reaches_beyond_the_group_that_covers_least,
    our_block_is_the_schedulers,
    our_verdict_is_lmcaches,
    our_verdict_is_vllms_offloading,
    a_prompt_that_fills_no_chunk_is_never_stored,
)


def main() -> None:
    for check in PROPERTIES:
        check()
    v4 = [256, 64, 64, 4, 8]
    print(
        json.dumps(
            {
                "held": [check.__name__ for check in PROPERTIES],
                "verdicts": verdicts,
                "offloading": offloading,
                "engine_driven": [engine_driven_takes(groups) for groups in (1, 2)],
                "load_with_a_missing_group": a_load_with_a_missing_group(),
                "published": {
                    "all groups": published_store(v4, [0, 1, 2, 3, 4], 4096, 1024, 4),
                    "first group missing": published_store(v4, [1, 2, 3, 4], 4096, 1024, 4),
                    "96 beside 64, chunk 256": published_store([96, 64], [0, 1], 512, 256, 32),
                },
                "installed": {
                    "all groups": [len(ids) for ids in slice_block_ids_per_group(allocated(v4, 4096), v4, 0, 4096)],
                    "first group missing": stored_without_the_first(v4),
                    "96 beside 64, chunk 256": cut([96, 64], 256),
                },
            }
        )
    )


def stored_without_the_first(group_sizes: list[int]) -> list[int]:
    blocks = allocated(group_sizes, 4096)
    del blocks[0]
    made = LMCacheMPRequestMetadata.GetStoreMetadata(tracker_of(blocks, 4096, scheduled=4096), 1024, group_sizes)
    return [] if made is None else [len(ids) for ids in made.op.block_ids]


def cut(group_sizes: list[int], end: int) -> str:
    try:
        slice_block_ids_per_group(allocated(group_sizes, 4096), group_sizes, 0, end)
    except ValueError as error:
        return type(error).__name__
    return "sliced"


if __name__ == "__main__":
    main()
