"""Warnings of the `lmcache:` section: what engines cannot register in time, and switches of patches for ROCm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pdserve.recipe.load.problems import Problem
from pdserve.recipe.rules.caches import registration_timeouts
from tests.plan.kit import on_gpus, recipe, with_lmcache
from tests.recipe.kit import CPU, GPU, load, refused
from tests.tables import each_row

ON_DEMAND = {"LMCACHE_ROCM_DEMAND_PINNED_ALLOCATOR": "1"}
GIB = 1 << 30


def problems(platform: str = "rocm", args: dict[str, Any] | None = None, **section: Any) -> list[Problem]:
    changes = {"prefill": {"args": args or {}}}
    return [*registration_timeouts(recipe(on_gpus(4, 4, platform=platform), with_lmcache(**section), changes))]


@each_row("l1, seconds, advised", [(900, 300, 900), (1200, 1199, 1200), (100, 60, 300)])
def test_a_second_for_each_gib_of_l1(l1: int, seconds: int, advised: int) -> None:
    [problem] = problems(l1_size_gb=l1, mq_timeout_seconds=seconds)
    assert problem.path == ("lmcache", "mq_timeout_seconds")
    assert f"within {seconds} s" in problem.what
    assert f"{l1} GiB" in problem.what
    assert problem.todo == f"write lmcache.mq_timeout_seconds: {advised}"
    assert problems(l1_size_gb=l1, mq_timeout_seconds=advised) == []


def test_kv_of_a_stated_size_is_registered_too_by_every_worker() -> None:
    stated = {"kv-cache-memory-bytes": 100 * GIB}
    assert problems(l1_size_gb=900, mq_timeout_seconds=900) == []
    [problem] = problems(l1_size_gb=900, mq_timeout_seconds=900, args=stated)
    assert "1300 GiB" in problem.what


def test_l1_that_is_pinned_on_demand_counts_with_what_is_pinned_at_the_start() -> None:
    assert problems(l1_size_gb=2500, l1_init_size_gb=20, env=ON_DEMAND) == []
    [problem] = problems(l1_size_gb=2500, l1_init_size_gb=200, env=ON_DEMAND)
    assert "200 GiB" in problem.what


@each_row("platform", ["cuda", "cpu"])
def test_no_such_stall_is_known_of_other_platforms(platform: str) -> None:
    assert problems(platform, l1_size_gb=2500) == []


ROCM = GPU.replace("platform: cuda", "platform: rocm")
DEMAND, COPY = "LMCACHE_ROCM_DEMAND_PINNED_ALLOCATOR", "LMCACHE_ROCM_MP_BLOCK_FALLBACK"


def with_env(text: str, **env: str | int) -> str:
    return text + "  env:\n" + "".join(f"    {name}: {value}\n" for name, value in env.items())


@each_row("env, message", [
    ({DEMAND: "yes"}, "yes is neither 1 (on) nor 0 (off)"),
    ({DEMAND: 1, "LMCACHE_ROCM_DEMAND_PINNED_STEP_GB": "lots"}, "lots is not a positive number of GiB"),
    ({DEMAND: 1, "LMCACHE_ROCM_DEMAND_PINNED_STEP_GB": 0}, "0 is not a positive number of GiB"),
])  # fmt: skip
def test_values_that_no_patch_understands_are_refused(tmp_path: Path, env: dict[str, str | int], message: str) -> None:
    assert message in refused(tmp_path, with_env(ROCM, **env))


def test_a_switch_among_the_engines_variables_is_refused(tmp_path: Path) -> None:
    message = refused(tmp_path, ROCM + f"engine:\n  env:\n    {DEMAND}: 1\n")
    assert "it is for the LMCache server" in message
    assert "write it into lmcache.env" in message


@each_row("text", [GPU, CPU])
def test_on_other_platforms_a_switch_does_nothing_which_is_a_warning(tmp_path: Path, text: str) -> None:
    (warning,) = [w for w in load(tmp_path, with_env(text, **{DEMAND: 1})).warnings if DEMAND in w]
    assert "has no effect on" in warning
    (warning,) = [w for w in load(tmp_path, with_env(ROCM, **{DEMAND: 1, COPY: 1})).warnings if "LMCACHE_ROCM" in w]
    assert "has no effect: lmcache 0.4.7 and later copy blocks" in warning
