"""The recipes that were written from launches which others have published."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.recipe.connectors.mooncake_store import MooncakeStoreSection
from pdserve.recipe.connectors.nixl import NixlSection
from pdserve.recipe.connectors.registry import MultiSection
from pdserve.recipe.effective import args_of
from pdserve.recipe.load.loader import load_recipe
from pdserve.recipe.model import Recipe
from tests.recipe.kit import RECIPES

NAMES = ("minimax-m3-mi355x-lmcache", "gpt-oss-h200-1p3d", "qwen36-27b-lmcache", "minimax-m3-gb300-store")


def shipped(name: str) -> Recipe:
    return load_recipe(_path(name), environ={}).recipe


def _path(name: str) -> Path:
    return RECIPES / f"{name}.yaml"


@pytest.mark.parametrize("name", NAMES)
def test_it_names_its_source_with_the_commit_and_the_page_of_differences(name: str) -> None:
    head = _path(name).read_text().partition("\nschema:")[0]
    assert "# Source: " in head
    assert "commit " in head
    assert "docs/launches.md" in head


@pytest.mark.parametrize("name", NAMES)
def test_it_is_untested_and_names_a_public_release_of_vllm(name: str) -> None:
    recipe = shipped(name)
    assert recipe.status == "untested"
    assert recipe.image is not None
    assert recipe.image.startswith("docker.io/vllm/vllm-openai")
    assert "nightly" not in recipe.image


def test_drafts_are_judged_by_the_model_and_not_by_a_coin() -> None:
    """The published benchmarks accept drafts at a fixed rate: as fast as it should be, with wrong text."""
    drafting = [args_of(recipe, role) for recipe in map(shipped, NAMES) for _, role in recipe.roles()]
    configs = [args["speculative-config"] for args in drafting if "speculative-config" in args]
    assert len(configs) == 3
    assert all("rejection_sample_method" not in config for config in configs)


def test_gpt_oss_has_three_decodes_for_one_prefill_on_one_host() -> None:
    recipe = shipped("gpt-oss-h200-1p3d")
    assert [(name, role.instances, role.parallel.tp) for name, role in recipe.roles()] == [
        ("prefill", 1, 2),
        ("decode", 3, 2),
    ]
    assert recipe.devices_per_node == 8


def test_the_hybrid_model_has_chunks_of_one_block_and_steps_below_two() -> None:
    recipe = shipped("qwen36-27b-lmcache")
    assert recipe.lmcache is not None
    (_, role), *_ = recipe.roles()
    block = recipe.lmcache.chunk_size
    assert recipe.model.kv_group_blocks == [block, block]
    assert args_of(recipe, role)["max-num-batched-tokens"] == 2 * block - 1
    assert args_of(recipe, role)["mamba-cache-mode"] == "align"


def test_minimax_on_mi355x_has_an_lmcache_server_for_each_rank() -> None:
    recipe = shipped("minimax-m3-mi355x-lmcache")
    assert recipe.lmcache is not None
    assert (recipe.lmcache.per, recipe.lmcache.l1_size_gb) == ("tp-rank", 75)


def test_decodes_beside_a_store_give_it_memory_and_do_not_look_prompts_up() -> None:
    (_, prefill), (_, decode) = shipped("minimax-m3-gb300-store").roles()
    assert prefill.connector == MultiSection(of=[NixlSection(), MooncakeStoreSection()])
    assert decode.connector == MultiSection(of=[NixlSection(), MooncakeStoreSection(lookup=False)])
