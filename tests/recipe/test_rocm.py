"""Switches of the LMCache server's patches for ROCm."""

from __future__ import annotations

from pathlib import Path

from tests.recipe.kit import CPU, GPU, load, refused
from tests.tables import each_row

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


def test_the_switches_of_the_published_pipeline_are_valid_and_those_of_old_versions_do_nothing(tmp_path: Path) -> None:
    env: dict[str, str | int] = {
        DEMAND: 1, "LMCACHE_ROCM_DEMAND_PINNED_STEP_GB": 64, COPY: 1,
        "LMCACHE_ROCM_MP_BLOCK_FALLBACK_DTYPE": "bfloat16",
    }  # fmt: skip
    warned = [w for w in load(tmp_path, with_env(ROCM, **env)).warnings if "LMCACHE_ROCM" in w]
    assert len(warned) == 2
    assert all(COPY in w and "has no effect: lmcache 0.4.7 and later copy blocks" in w for w in warned)


@each_row("text", [GPU, CPU])
def test_on_other_platforms_a_switch_does_nothing_which_is_a_warning(tmp_path: Path, text: str) -> None:
    (warning,) = [w for w in load(tmp_path, with_env(text, **{DEMAND: 1})).warnings if DEMAND in w]
    assert "has no effect on" in warning
