"""The recipes that come with pdserve."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from pdserve.recipe.effective import args_of, draft_models, env_of
from pdserve.recipe.load.loader import LoadedRecipe, load_recipe
from tests.recipe.kit import RECIPES
from tests.tables import each_row

FILES = sorted(RECIPES.glob("*.yaml"))
KIMI = [path for path in FILES if path.name.startswith("kimi")]
DANGEROUS = (
    # Retired switches that vLLM or LMCache of today do not read.
    "VLLM_USE_V1", "VLLM_ROCM_USE_AITER_PAGED_ATTN", "VLLM_USE_AITER_TRITON_SILU_MUL",
    "LMCACHE_ROCM_DEMAND_PINNED_ALLOCATOR", "LMCACHE_ROCM_MP_BLOCK_FALLBACK", "CHUNKED_LMCACHE_MAX_TOKENS_PER_LOAD",
    "LMCACHE_BLOCKING_TIMEOUT_SECS",
    # Wrong KV, or memory that LMCache cannot map.
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
)  # fmt: skip


@cache
def _load(path: Path) -> LoadedRecipe:
    return load_recipe(path, environ={})


@each_row("path", FILES)
def test_it_loads_without_any_variable_and_without_a_warning_on_its_own_platform(path: Path) -> None:
    """But that of a model whose commit could not be looked up, that of a proxy for clients on other nodes, whose
    certificate only its site can make, and that of an image, whose kind of container only its site knows."""
    loaded = _load(path)
    opened = ["keys and prompts travel to 0.0.0.0 in the clear"] * (loaded.recipe.proxy.host == "0.0.0.0")
    drafts = {draft for _, role in loaded.recipe.roles() for draft in draft_models(loaded.recipe, role)}
    models = len(drafts) + (loaded.recipe.model.id is not None)
    unpinned = ["another start, or another node, may get other weights"] * models
    boxed = ["without a container section everything runs with the programs of the node"] * (
        loaded.recipe.image is not None
    )
    shown = [warning.partition(" -> ")[0].rpartition(": ")[2] for warning in loaded.warnings]
    assert shown == [*opened, *unpinned, *boxed]
    assert loaded.recipe.name == path.stem
    assert loaded.recipe.description


@each_row("path", sorted(RECIPES.rglob("*.yaml")))
def test_it_opens_with_the_header_that_editors_read(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    prefix = "# yaml-language-server: $schema="
    assert first.startswith(prefix)
    assert (path.parent / first.removeprefix(prefix)).resolve() == (
        RECIPES.parent / "schema/recipe.schema.json"
    ).resolve()


@each_row("path", FILES)
def test_its_resolved_form_is_a_recipe_of_its_own(path: Path, tmp_path: Path) -> None:
    loaded = _load(path)
    (tmp_path / "resolved.yaml").write_text(loaded.to_yaml())
    again = load_recipe(tmp_path / "resolved.yaml", environ={})
    assert again.to_yaml() == loaded.to_yaml()
    files: dict[str, Any] = {"proxy": {"auth": {"keys_file"}}}
    assert again.recipe.model_dump(exclude=files) == loaded.recipe.model_dump(exclude=files), "files become absolute"


@each_row("path", KIMI)
def test_kimi_recipes_leave_out_what_is_dangerous(path: Path) -> None:
    recipe = _load(path).recipe
    for name, role in recipe.roles():
        assert not set(env_of(recipe, role)) & set(DANGEROUS), name


def test_drafts_are_judged_by_the_model_and_not_by_a_coin() -> None:
    """The published benchmarks accept drafts at a fixed rate: as fast as it should be, with wrong text."""
    recipes = [_load(path).recipe for path in FILES]
    args = [args_of(recipe, role) for recipe in recipes for _, role in recipe.roles()]
    configs = [flags["speculative-config"] for flags in args if "speculative-config" in flags]
    assert len(configs) >= 3
    assert all("rejection_sample_method" not in config for config in configs)


@each_row("path", FILES)
def test_vllm_waits_for_its_engine_as_long_as_pdserve_does(path: Path) -> None:
    recipe = _load(path).recipe
    for _, role in recipe.roles():
        own = env_of(recipe, role).get("VLLM_ENGINE_READY_TIMEOUT_S", 600)
        assert int(str(own)) >= recipe.timeouts.engine_seconds
