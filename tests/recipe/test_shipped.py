"""The recipes that come with pdserve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdserve.recipe.connectors.lmcache_mp import LmcacheMpSection
from pdserve.recipe.connectors.mooncake import MooncakeSection
from pdserve.recipe.connectors.registry import MultiSection
from pdserve.recipe.effective import args_of, env_of
from pdserve.recipe.hub_models import draft_models
from pdserve.recipe.load.loader import LoadedRecipe, load_recipe
from pdserve.recipe.model import Recipe, Role
from tests.recipe.kit import RECIPES

FILES = sorted(RECIPES.glob("*.yaml"))
KIMI = [path for path in FILES if path.name.startswith("kimi")]
DANGEROUS = (
    # Retired switches that vLLM or LMCache of today do not read.
    "VLLM_USE_V1",
    "VLLM_ROCM_USE_AITER_PAGED_ATTN",
    "VLLM_USE_AITER_TRITON_SILU_MUL",
    "LMCACHE_ROCM_DEMAND_PINNED_ALLOCATOR",
    "LMCACHE_ROCM_MP_BLOCK_FALLBACK",
    "CHUNKED_LMCACHE_MAX_TOKENS_PER_LOAD",
    "LMCACHE_BLOCKING_TIMEOUT_SECS",
    # Wrong KV, or memory that LMCache cannot map.
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
)


def shipped(name: str) -> Recipe:
    return _load(RECIPES / name).recipe


def _load(path: Path) -> LoadedRecipe:
    return load_recipe(path, environ={})


def test_these_recipes_are_shipped() -> None:
    assert {path.name for path in FILES} >= {
        "tiny-cpu.yaml",
        "tiny-cpu-2p2d.yaml",
        "tiny-cpu-router.yaml",
        "tiny-cpu-lmcache.yaml",
        "kimi-mi355x.yaml",
        "kimi-mi355x-2node.yaml",
        "kimi-mi355x-lmcache.yaml",
        "deepseek-r1-wide-ep.yaml",
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
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


@pytest.mark.parametrize("path", sorted(RECIPES.rglob("*.yaml")), ids=lambda path: path.name)
def test_it_opens_with_the_header_that_editors_read(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    prefix = "# yaml-language-server: $schema="
    assert first.startswith(prefix)
    assert (path.parent / first.removeprefix(prefix)).resolve() == (
        RECIPES.parent / "schema/recipe.schema.json"
    ).resolve()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_its_resolved_form_is_a_recipe_of_its_own(path: Path, tmp_path: Path) -> None:
    loaded = _load(path)
    (tmp_path / "resolved.yaml").write_text(loaded.to_yaml())
    again = load_recipe(tmp_path / "resolved.yaml", environ={})
    assert again.to_yaml() == loaded.to_yaml()
    files: dict[str, Any] = {"proxy": {"auth": {"keys_file"}}}
    assert again.recipe.model_dump(exclude=files) == loaded.recipe.model_dump(exclude=files), "files become absolute"


def test_tiny_cpu_is_one_prefill_and_one_decode_with_lmcache_on_prefill() -> None:
    recipe = shipped("tiny-cpu.yaml")
    (_, prefill), (_, decode) = recipe.roles()
    assert (prefill.instances, decode.instances) == (1, 1)
    assert prefill.connector == MultiSection(of=[MooncakeSection(protocol="tcp"), LmcacheMpSection()])
    assert decode.connector == MooncakeSection(protocol="tcp")
    assert recipe.lmcache is not None
    assert (recipe.lmcache.transfer_mode, recipe.lmcache.l1_size_gb) == ("auto", 1)
    assert recipe.verify.output == "exact"
    assert recipe.engine.cache_reset_endpoint
    assert recipe.model.path == "../.cache/tiny-model"


def test_tiny_cpu_2p2d_differs_in_the_number_of_instances() -> None:
    single, two = shipped("tiny-cpu.yaml"), shipped("tiny-cpu-2p2d.yaml")
    assert [role.instances for _, role in two.roles()] == [2, 2]
    assert [role.connector for _, role in two.roles()] == [role.connector for _, role in single.roles()]
    assert two.lmcache == single.lmcache


def test_tiny_cpu_router_differs_in_the_proxy_and_has_no_lmcache() -> None:
    with_our_proxy, other = shipped("tiny-cpu.yaml"), shipped("tiny-cpu-router.yaml")
    assert (with_our_proxy.proxy.kind, other.proxy.kind) == ("pdserve", "vllm-router")
    assert other.proxy.model_fields_set == {"kind"}
    assert [role.connector for _, role in other.roles()] == [MooncakeSection(protocol="tcp")] * 2
    assert other.lmcache is None


def test_kimi_on_one_host_takes_half_of_it_for_each_role() -> None:
    recipe = shipped("kimi-mi355x.yaml")
    assert _shape(recipe) == [("prefill", 1, 4), ("decode", 1, 4)]
    assert recipe.devices_per_node == 8


def test_kimi_on_two_hosts_takes_a_host_for_each_role() -> None:
    recipe = shipped("kimi-mi355x-2node.yaml")
    assert _shape(recipe) == [("prefill", 1, 8), ("decode", 1, 8)]
    assert sum(role.parallel.tp for _, role in recipe.roles()) > recipe.devices_per_node


def test_kimi_with_lmcache_alone_is_aggregated() -> None:
    recipe = shipped("kimi-mi355x-lmcache.yaml")
    assert recipe.mode == "aggregated"
    assert _shape(recipe) == [("aggregated", 1, 8)]
    assert recipe.lmcache is not None
    assert recipe.lmcache.on == ["aggregated"]


@pytest.mark.parametrize("path", KIMI, ids=lambda path: path.name)
def test_kimi_recipes_are_untested_and_for_rocm(path: Path) -> None:
    recipe = _load(path).recipe
    assert recipe.status == "untested"
    assert recipe.platform == "rocm"
    assert recipe.image is not None
    assert recipe.image.startswith("docker.io/vllm/vllm-openai-rocm:v0.")
    assert recipe.requires["vllm"].startswith(">=0.26")
    assert recipe.model.id == "amd/Kimi-K2.5-MXFP4"
    assert recipe.verify.output == "logprobs"
    assert not recipe.engine.cache_reset_endpoint


@pytest.mark.parametrize("path", KIMI, ids=lambda path: path.name)
def test_kimi_recipes_leave_out_what_is_dangerous(path: Path) -> None:
    recipe = _load(path).recipe
    for name, role in recipe.roles():
        assert not set(env_of(recipe, role)) & set(DANGEROUS), name
        assert args_of(recipe, role)["gpu-memory-utilization"] == 0.9
    assert recipe.lmcache is not None
    assert "decode" not in recipe.lmcache.on
    assert recipe.lmcache.transfer_mode == "lmcache_driven"
    assert recipe.lmcache.l1_size_gb < 1000
    assert recipe.lmcache.l1_read_ttl_seconds == 7200
    assert recipe.lmcache.mq_timeout_seconds == 1200


@pytest.mark.parametrize("path", KIMI, ids=lambda path: path.name)
def test_kimi_recipes_have_what_vllms_own_recipe_of_the_checkpoint_has(path: Path) -> None:
    recipe = _load(path).recipe
    for _, role in recipe.roles():
        args, env = args_of(recipe, role), env_of(recipe, role)
        assert (args["tool-call-parser"], args["reasoning-parser"]) == ("kimi_k2", "kimi_k2")
        assert args["enable-auto-tool-choice"] is True
        assert args["block-size"] == 16
        assert env["VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS"] == 1
        assert env["VLLM_ROCM_USE_SKINNY_GEMM"] == 0
        assert env["AITER_MXFP4_INTERMEDIATE"] == 1
        assert "HSA_NO_SCRATCH_RECLAIM" not in env, "it depends on the node's firmware, which preflight reads"


@pytest.mark.parametrize("path", KIMI, ids=lambda path: path.name)
def test_aiter_rmsnorm_is_off_below_eight_ranks_only(path: Path) -> None:
    recipe = _load(path).recipe
    for _, role in recipe.roles():
        assert env_of(recipe, role)["VLLM_ROCM_USE_AITER_RMSNORM"] == (1 if role.parallel.tp == 8 else 0)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_vllm_waits_for_its_engine_as_long_as_pdserve_does(path: Path) -> None:
    recipe = _load(path).recipe
    for _, role in recipe.roles():
        own = env_of(recipe, role).get("VLLM_ENGINE_READY_TIMEOUT_S", 600)
        assert int(str(own)) >= recipe.timeouts.engine_seconds


def _shape(recipe: Recipe) -> list[tuple[str, int, int]]:
    def devices(role: Role) -> int:
        return role.parallel.workers

    return [(name, role.instances, devices(role)) for name, role in recipe.roles()]
