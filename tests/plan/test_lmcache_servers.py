"""LMCache servers beyond the golden plans: how many, for whom, what one cannot serve, and what is said on ROCm."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.errors import RecipeError
from tests.plan.kit import LMCACHE, MOONCAKE, hosts, on_gpus, plan, recipe, value_of, with_lmcache
from tests.tables import each_row

GIB = 1 << 30
GPU = with_lmcache(transfer_mode="lmcache_driven")


def test_the_first_part_is_never_larger_than_the_whole() -> None:
    process = plan(recipe(on_gpus(), GPU, {"lmcache": {"l1_size_gb": 8.5}}), *hosts(8)).process("lmcache-0")
    assert (value_of(process, "--l1-size-gb"), value_of(process, "--l1-init-size-gb")) == ("8.5", "8")


def test_servers_that_share_a_folder_of_l2_stage_apart_unless_the_recipe_sets_where() -> None:
    """lmcache#4991: two that write one key into one unfinished file leave a cut one under the final name."""

    def staged(**adapter: Any) -> list[str | None]:
        section = with_lmcache(per="tp-rank", transfer_mode="lmcache_driven", l2=[{"base_path": "/cache", **adapter}])
        built = plan(recipe(on_gpus(2, 1), section), *hosts(8))
        argvs = [process for process in built.processes if process.role == "lmcache"]
        return [json.loads(value_of(argv, "--l2-adapter")).get("relative_tmp_dir") for argv in argvs]

    for kind in ("fs", "fs_native"):
        folders = staged(type=kind)
        assert len(folders) == len(set(folders)) == 2
        assert all(folder and folder.startswith(".staging-") and "/" not in folder for folder in folders)
    assert staged(type="fs", relative_tmp_dir="mine") == ["mine", "mine"]
    assert staged(type="s3") == [None, None]


def test_workers_are_counted_over_all_parallelism() -> None:
    parallel = {"tp": 2, "pp": 2, "dp": 2}
    built = plan(recipe(on_gpus(), GPU, {"prefill": {"parallel": parallel}}), *hosts(16))
    assert built.lmcache[0].expected_workers == 8
    assert value_of(built.process("lmcache-0"), "--max-workers") == "8"


def test_on_a_cpu_lmcache_driven_moves_the_engines_kv_to_the_host_too_where_its_size_is_known() -> None:
    driven = {
        "prefill": {"connector": {"kind": "multi", "of": [LMCACHE, MOONCAKE]}, "instances": 2},
        "lmcache": {"l1_size_gb": 1, "transfer_mode": "lmcache_driven"},
    }
    (server,) = plan(recipe(driven, {"engine": {"env": {"VLLM_CPU_KVCACHE_SPACE": 2}}})).lmcache
    assert server.kv_bytes_on_host == 2 * 2 * GIB
    unknown = plan(recipe(driven))
    assert unknown.lmcache[0].kv_bytes_on_host == 0
    assert [w for w in unknown.warnings if "VLLM_CPU_KVCACHE_SPACE" in w]


@each_row(
    "change, message",
    [
        ({"prefill": {"parallel": {"tp": 1, "dp": 2}}}, "tensor parallelism only"),
        ({"prefill": {"parallel": {"tp": 1, "pp": 2}}}, "tensor parallelism only"),
        ({"prefill": {"parallel": {"tp": 2, "nodes": 2}}}, "spans nodes"),
    ],
)
def test_what_one_server_a_rank_cannot_serve_is_refused(change: dict[str, Any], message: str) -> None:
    section = with_lmcache(per="tp-rank", transfer_mode="lmcache_driven")
    with pytest.raises(RecipeError, match=message):
        plan(recipe(on_gpus(), section, change), *hosts(4, 4))


HANG, TRIAL = "lmcache#4419; seen with", "by simulation only"
ROCM, DRIVEN = on_gpus(platform="rocm"), with_lmcache(transfer_mode="lmcache_driven")


@each_row("changes, said", [
    ((ROCM, DRIVEN), HANG),
    ((ROCM, with_lmcache(transfer_mode="engine_driven")), None),
    ((on_gpus(), DRIVEN), None),
    ((ROCM,), None),
    ((ROCM, with_lmcache(transfer_mode="lmcache_driven", env={"LMCACHE_ROCM_HOST_EVENTS": "1"})), TRIAL),
])  # fmt: skip
def test_lmcache_driven_on_rocm_comes_with_a_word_about_its_hang_or_about_what_is_against_it(
    changes: tuple[dict[str, Any], ...], said: str | None
) -> None:
    warnings = [text for text in plan(recipe(*changes), *hosts(8)).warnings if HANG in text or TRIAL in text]
    assert [said in text for text in warnings if said] == [True] * bool(said)
    assert bool(warnings) == bool(said)
    assert all("engine_driven" in text and "gfx950" in text for text in warnings if HANG in text)
