"""The recipes that were written from launches which others have published."""

from __future__ import annotations

from pathlib import Path

from pdserve.recipe.effective import args_of
from pdserve.recipe.load.loader import load_recipe
from pdserve.recipe.model import Recipe
from tests.recipe.kit import RECIPES
from tests.tables import each_row

NAMES = ("minimax-m3-mi355x-lmcache", "gpt-oss-h200-1p3d", "qwen36-27b-lmcache", "minimax-m3-gb300-store")


def shipped(name: str) -> Recipe:
    return load_recipe(_path(name), environ={}).recipe


def _path(name: str) -> Path:
    return RECIPES / f"{name}.yaml"


@each_row("name", NAMES)
def test_it_names_its_source_with_the_commit_and_the_page_of_differences(name: str) -> None:
    head = _path(name).read_text().partition("\nschema:")[0]
    assert "# Source: " in head
    assert "commit " in head
    assert "docs/launches.md" in head


@each_row("name", NAMES)
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


def test_the_hybrid_model_has_chunks_of_one_block_and_steps_below_two() -> None:
    recipe = shipped("qwen36-27b-lmcache")
    assert recipe.lmcache is not None
    (_, role), *_ = recipe.roles()
    block = recipe.lmcache.chunk_size
    assert recipe.model.kv_group_blocks == [block, block]
    assert args_of(recipe, role)["max-num-batched-tokens"] == 2 * block - 1
    assert args_of(recipe, role)["mamba-cache-mode"] == "align"
