"""Recipes for models whose KV has several groups: what is refused before anything starts, and what is only said."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.errors import PreflightError, RecipeError
from pdserve.installed.versions import Versions
from pdserve.plan.model_rules import check_kv_groups
from tests.plan.kit import NIXL, VERSIONS, aggregated, on_gpus, recipe, with_lmcache
from tests.tables import each_row

PLAIN = {"model_type": "llama", "num_attention_heads": 4}
WINDOWS = {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"]}
STATE = {"layer_types": ["linear_attention", "full_attention"]}
DRIVEN = with_lmcache(transfer_mode="lmcache_driven")
ON_GPU = (on_gpus(), DRIVEN)
ONE_GROUP = {"engine": {"args": {"disable-hybrid-kv-cache-manager": True}}}
BLOCKS = {"engine": {"args": {"block-size": 1056}}, "lmcache": {"chunk_size": 1056}}


def warnings_of(config: dict[str, Any] | None, *changes: dict[str, Any], **versions: str | None) -> list[str]:
    return list(check_kv_groups(recipe(*changes), config, installed(**versions)))


def installed(**versions: str | None) -> Versions:
    return VERSIONS.model_copy(update=versions)


def refused(kind: type[Exception], config: dict[str, Any], *changes: dict[str, Any], **versions: str | None) -> Any:
    with pytest.raises(kind) as caught:
        warnings_of(config, *changes, **versions)
    error: Any = caught.value
    assert error.todo
    return error


OLD: dict[str, str | None] = {"vllm": "0.21.0", "lmcache": "0.4.5"}
UNKNOWN: dict[str, str | None] = {"vllm": None, "lmcache": None}
ON_NIXL = (on_gpus(), {"prefill": {"connector": NIXL}, "decode": {"connector": NIXL}})


@each_row(
    "config, changes, versions",
    [
        (PLAIN, ON_GPU, {}),
        (PLAIN, ON_GPU, OLD),
        (PLAIN, (with_lmcache(),), UNKNOWN),
        (PLAIN, (aggregated(),), OLD),
        (WINDOWS, ON_GPU, {}),
        (WINDOWS, ON_GPU, {"vllm": "0.33.0"}),
        ({"compress_ratios": [1, 4]}, ON_GPU, {"vllm": "0.23.0", "lmcache": "0.4.7"}),
        (WINDOWS, ON_GPU, UNKNOWN),
        (WINDOWS, ON_GPU, {"vllm": "a-branch", "lmcache": "a-branch"}),
        # What goes wrong there before vllm 0.30 (vllm#52234) is the patch nixl-failed-groups'.
        (WINDOWS, ON_NIXL, {"vllm": "0.27.1"}),
        (STATE, ON_NIXL, {"vllm": "0.27.1"}),
        # Windows may be kept as full attention on purpose anywhere.
        (WINDOWS, (with_lmcache(transfer_mode="auto"), ONE_GROUP), {}),
        (WINDOWS, (*ON_GPU, ONE_GROUP), OLD),
        (WINDOWS, (on_gpus(), with_lmcache(transfer_mode="auto")), {}),
    ],
)
def test_pairs_that_handle_the_groups_of_a_model_are_neither_refused_nor_warned_of(
    config: dict[str, Any], changes: tuple[dict[str, Any], ...], versions: dict[str, str | None]
) -> None:
    assert warnings_of(config, *changes, **versions) == []


def test_recurrent_state_is_taken_with_a_word_about_its_block() -> None:
    warning, _ = warnings_of(STATE, *ON_GPU)
    assert "Setting attention block size" in warning
    assert "engine.args.block-size" in warning


@each_row("lmcache, end", [
    ("0.5.6", "take LMCache off this model"), (None, "take LMCache off this model"),
    ("a-branch", "take LMCache off this model"), ("0.5.5", ": use lmcache >= 0.5.6"),
])  # fmt: skip
def test_recurrent_state_in_lmcache_is_a_warning_with_its_cure(lmcache: str | None, end: str) -> None:
    (warning,) = [text for text in warnings_of(STATE, *ON_GPU, BLOCKS, lmcache=lmcache) if "lmcache#4984" in text]
    assert warning.endswith(end)


@each_row("config", [WINDOWS, STATE])
def test_engine_driven_transfer_takes_one_group_only(config: dict[str, Any]) -> None:
    """On a CPU that is what `auto` means."""
    error = refused(RecipeError, config, with_lmcache(transfer_mode="auto"))
    assert error.where == "lmcache.transfer_mode"
    assert ("disable-hybrid-kv-cache-manager" in error.todo) == (config is WINDOWS)


def test_recurrent_state_cannot_do_without_the_manager() -> None:
    error = refused(RecipeError, STATE, *ON_GPU, ONE_GROUP)
    assert error.where == "engine.args.disable-hybrid-kv-cache-manager"


@each_row("config, changes, versions, message", [
    (WINDOWS, ON_GPU, {"vllm": "0.22.0"}, "vllm 0.22.0 turns its hybrid KV cache manager off"),
    (WINDOWS, ON_GPU, {"vllm": "0.32.0", "lmcache": "0.4.6"}, "lmcache 0.4.6 knows one KV group only"),
    (STATE, (on_gpus(),), {"vllm": "0.22.1"}, "vllm#42554"), (STATE, ON_GPU, {"vllm": "0.23.0rc1"}, "vllm#42554"),
])  # fmt: skip
def test_releases_that_give_up_groups_or_state_are_refused(
    config: dict[str, Any], changes: tuple[dict[str, Any], ...], versions: dict[str, str], message: str
) -> None:
    error = refused(PreflightError, config, *changes, **versions)
    assert message in error.what
    if config is WINDOWS:
        assert "prefill.args.disable-hybrid-kv-cache-manager: true" in error.todo


def test_drafts_in_recurrent_state_that_decode_takes_over_are_refused_until_they_are_taken_back() -> None:
    nixl = {role: {"connector": NIXL} for role in ("prefill", "decode")}
    drafts = {"decode": {"args": {"speculative-config": {"method": "mtp", "num_speculative_tokens": 1}}}}
    error = refused(PreflightError, STATE, on_gpus(), nixl, drafts, vllm="0.29.0")
    assert "vllm#47466" in error.what
    assert error.where == "decode.args.speculative-config"
    assert "use vllm >= 0.30" in error.todo
    assert warnings_of(STATE, on_gpus(), nixl, drafts, vllm="0.30.0") == []
    assert warnings_of(STATE, on_gpus(), nixl, {"prefill": drafts["decode"]}, vllm="0.29.0") == []


def test_a_model_by_id_is_unknown_which_is_only_a_warning() -> None:
    by_id = {"model": {"path": None, "id": "org/model"}}
    (warning,) = warnings_of(None, *ON_GPU, by_id)
    assert "its config.json is not here" in warning
    assert warnings_of(None, on_gpus(), by_id) == [], "without LMCache there is nothing to store"
    assert warnings_of(None, *ON_GPU) == [], "a folder: the preflight looks into it"


def test_layers_of_unknown_kinds_are_a_warning() -> None:
    (warning,) = warnings_of({"layer_types": ["quantum_attention"]}, *ON_GPU)
    assert "layer_types names layers of unknown kinds" in warning


def test_the_block_of_recurrent_state_must_divide_the_chunk_and_fit_a_step() -> None:
    uneven = {"engine": {"args": {"block-size": 1056}}, "lmcache": {"chunk_size": 1024}}
    error = refused(RecipeError, STATE, *ON_GPU, uneven)
    assert (error.where, error.todo) == ("lmcache.chunk_size", "use 1056")
    small_step = {"engine": {"args": {"block-size": 1056, "max-num-batched-tokens": 1024}}}
    # Attention blocks alone would fill up over several steps: only state has to fit into one.
    assert warnings_of(PLAIN, *ON_GPU, BLOCKS, small_step) == []
    assert refused(RecipeError, STATE, *ON_GPU, BLOCKS, small_step).where == "engine.args.max-num-batched-tokens"


def test_the_blocks_of_the_groups_can_be_stated() -> None:
    five = {"model": {"kv_group_blocks": [256, 64, 64, 4, 8]}}
    assert warnings_of({"compress_ratios": [1, 4]}, *ON_GPU, five) == []
    error = refused(RecipeError, {"compress_ratios": [1, 4]}, *ON_GPU, five, {"lmcache": {"chunk_size": 320}})
    assert "whole blocks of 256, 64, 8, 4 tokens" in error.what
    assert error.todo == "use 256"
    assert refused(RecipeError, PLAIN, *ON_GPU, {"model": {"kv_group_blocks": [96]}}).todo == "use 192"


def test_chunks_that_no_prompt_fills_are_refused() -> None:
    error = refused(RecipeError, PLAIN, *ON_GPU, {"engine": {"args": {"max-model-len": 256}}})
    assert error.where == "lmcache.chunk_size"
    assert warnings_of(PLAIN, *ON_GPU, {"engine": {"args": {"max-model-len": 257}}}) == []
    assert warnings_of(PLAIN, *ON_GPU, {"decode": {"args": {"max-model-len": 64}}}) == [], "decode stores nothing"
    assert warnings_of(PLAIN, *ON_GPU, {"engine": {"args": {"max-model-len": "128k"}}}) == []


def test_an_offloading_connector_that_cuts_uneven_groups_by_tokens_is_refused() -> None:
    offloading = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"block_size": 256},
    }
    raw = {role: {"connector": {"kind": "raw", "config": offloading}} for role in ("prefill", "decode")}
    with pytest.raises(RecipeError, match="use blocks_per_chunk"):
        warnings_of(PLAIN, on_gpus(), raw, {"model": {"kv_group_blocks": [256, 64]}})
