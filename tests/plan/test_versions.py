"""What the table of versions refuses, warns about and lets pass."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.errors import PreflightError, RecipeError
from pdserve.patches.registry import REGISTRY
from pdserve.plan.model import Versions
from tests.plan.kit import MULTI, NIXL, VERSIONS, aggregated, hosts, on_gpus, plan, recipe, with_lmcache

KNOWN_CODE = {"vllm": "0.32.0", "lmcache": "0.5.6"}
DECODE_TOO = with_lmcache(on=["prefill", "decode"]) | {"decode": {"connector": MULTI}}
PLAIN: dict[str, Any] = {}


def installed(**versions: str | None) -> Versions:
    return VERSIONS.model_copy(update=versions)


def test_tested_versions_are_no_warning() -> None:
    assert plan(recipe(with_lmcache())).warnings == ()


@pytest.mark.parametrize(
    ("change", "versions", "message"),
    [
        (with_lmcache(), {"vllm": "0.24.0"}, "vllm#46865"),
        (with_lmcache(), {"vllm": "0.26.0rc1"}, "vllm#46865"),
        (DECODE_TOO, {"lmcache": "0.5.4"}, "lmcache#4355"),
        (with_lmcache(), {"lmcache": "0.4.4"}, "no connector for its MP server"),
        (aggregated(), {"vllm": "0.21.0"}, "does not import on this vllm"),
    ],
)
def test_what_never_works_is_refused_with_the_reason(
    change: dict[str, Any], versions: dict[str, str], message: str
) -> None:
    with pytest.raises(PreflightError, match=message) as caught:
        plan(recipe(change), versions=installed(**versions))
    assert caught.value.todo


def test_one_server_a_rank_needs_a_client_that_knows_several() -> None:
    wanted = recipe(on_gpus(2, 1), with_lmcache(per="tp-rank"))
    with pytest.raises(PreflightError, match="knows one server only"):
        plan(wanted, *hosts(8), versions=installed(lmcache="0.4.9"))


def test_an_old_vllm_is_fine_where_its_defect_is_not_in_use() -> None:
    built = plan(recipe(PLAIN), versions=installed(vllm="0.24.0"))
    assert [w for w in built.warnings if "outside what is known" in w]


@pytest.mark.parametrize(
    ("change", "versions", "message"),
    [
        (PLAIN, {"vllm": "0.29.1"}, "vllm#35943"),
        (PLAIN, {"vllm": "0.40.0"}, "vllm 0.40.0 is outside what is known"),
        (PLAIN, {"vllm": None}, "vllm is not installed here"),
        (PLAIN, {"mooncake": None}, "mooncake is not installed here"),
        (PLAIN, {"vllm": "main-2026-08"}, "vllm main-2026-08 is outside what is known"),
        (with_lmcache(), {"lmcache": "0.6.1"}, "lmcache 0.6.1 is outside what is known"),
    ],
)
def test_what_is_doubtful_is_a_warning(change: dict[str, Any], versions: dict[str, str | None], message: str) -> None:
    built = plan(recipe(change), versions=installed(**versions))
    assert [w for w in built.warnings if message in w]


@pytest.mark.parametrize("version", ["0.27.0", "0.27.1", "0.29.0"])
def test_endless_preemption_of_three_releases_is_a_warning_unless_their_steps_do_not_overlap(version: str) -> None:
    overlapping = plan(recipe(PLAIN), versions=installed(vllm=version))
    in_turn = plan(recipe({"engine": {"args": {"async-scheduling": False}}}), versions=installed(vllm=version))
    one_side = plan(recipe({"prefill": {"args": {"async-scheduling": False}}}), versions=installed(vllm=version))
    assert [w for w in one_side.warnings if "vllm#49674" in w]
    assert not [w for w in plan(recipe(), versions=installed(vllm="0.30.0")).warnings if "vllm#49674" in w]
    assert [w for w in overlapping.warnings if "vllm#49674" in w and "async-scheduling: false" in w]
    assert not [w for w in in_turn.warnings if "vllm#49674" in w]


def test_packages_that_the_recipe_does_not_use_are_not_missed() -> None:
    assert plan(recipe(), versions=installed(lmcache=None, nixl=None)).warnings == ()


def test_an_installed_version_outside_requires_is_this_machines_fault() -> None:
    with pytest.raises(PreflightError) as caught:
        plan(recipe({"requires": {"vllm": ">=0.33"}}))
    assert caught.value.what == "vllm 0.32.0 is installed, the recipe requires >=0.33"
    assert caught.value.where == "requires.vllm"


@pytest.mark.parametrize("version", ["0.33.0", "0.33.1.dev5+g1234abc", None, "a-branch"])
def test_requires_lets_pass_what_is_inside_or_unknown(version: str | None) -> None:
    assert plan(recipe({"requires": {"vllm": ">=0.33"}}), versions=installed(vllm=version)).names()


def test_a_build_without_tags_is_judged_as_the_release_whose_code_it_has() -> None:
    branch = {"vllm": "0.1.dev5+gabc", "lmcache": "0.5.6.dev30+gabc"}
    wanted = recipe(with_lmcache(), {"requires": {"vllm": ">=0.26,<0.34", "lmcache": ">=0.5.6"}})
    built = plan(wanted, versions=installed(**branch).model_copy(update={"same_code": KNOWN_CODE}))
    assert built.warnings == (
        "vllm 0.1.dev5+gabc is planned for as 0.32.0: the code that patches depend on is the same",
        "lmcache 0.5.6.dev30+gabc is planned for as 0.5.6: the code that patches depend on is the same",
    )
    assert [p.patches for p in built.processes] == [p.patches for p in plan(wanted).processes]
    with pytest.raises(PreflightError, match=r"vllm 0\.1\.dev5\+gabc is installed"):
        plan(wanted, versions=installed(**branch))


def test_transfers_that_were_reported_to_mix_kv_are_a_warning_on_accelerators_over_rdma() -> None:
    rdma = {role: {"connector": {"kind": "mooncake", "protocol": "rdma"}} for role in ("prefill", "decode")}
    assert [w for w in plan(recipe(on_gpus(), rdma)).warnings if "vllm#44238" in w and "kind nixl" in w]
    assert not [w for w in plan(recipe(on_gpus())).warnings if "vllm#44238" in w]
    assert not [w for w in plan(recipe()).warnings if "vllm#44238" in w]
    nixl = {"prefill": {"connector": NIXL}, "decode": {"connector": NIXL}}
    assert not [w for w in plan(recipe(on_gpus(), nixl)).warnings if "vllm#44238" in w]


def test_a_mooncake_whose_writes_over_tcp_are_done_too_early_is_refused() -> None:
    """tests/upstream/test_mooncake_writes.py says what was seen of it, and shows that the installed one is right."""
    with pytest.raises(PreflightError, match=r"Mooncake#2850") as caught:
        plan(recipe(), versions=installed(mooncake="0.3.11.post1"))
    assert caught.value.todo == "use mooncake >= 0.3.13"
    assert plan(recipe(), versions=installed(mooncake="0.3.12.post1")).names()
    rdma = {role: {"connector": {"kind": "mooncake", "protocol": "rdma"}} for role in ("prefill", "decode")}
    assert plan(recipe(on_gpus(), rdma), versions=installed(mooncake="0.3.11.post1")).names()


def test_a_second_level_of_lmcache_comes_with_a_warning() -> None:
    l2 = recipe(with_lmcache(l2=[{"type": "fs", "base_path": "/cache"}]))
    assert [w for w in plan(l2).warnings if "lmcache#5263" in w and "lmcache.l1_write_ttl_seconds" in w]
    assert not [w for w in plan(l2).warnings if "lmcache#4991" in w]
    assert [w for w in plan(l2, versions=installed(lmcache="0.5.5")).warnings if "lmcache#4991" in w]


STORE: dict[str, Any] = {"kind": "mooncake-store"}
DRAFTS = {"args": {"speculative-config": {"method": "mtp", "num_speculative_tokens": 2}}}


def with_store(**decode: Any) -> dict[str, Any]:
    """Prefill stores; `decode`: its own store, if any."""
    return {
        "prefill": {"connector": {"kind": "multi", "of": [NIXL, STORE]}},
        "decode": {"connector": {"kind": "multi", "of": [NIXL, STORE | decode]} if decode else NIXL},
        "mooncake_store": {"segment_gib": 1, "protocol": "tcp"},
    }


@pytest.mark.parametrize("version", ["0.26.0", "0.27.1"])
def test_a_store_that_keeps_the_kv_of_others_after_a_preemption_is_refused(version: str) -> None:
    with pytest.raises(PreflightError, match="vllm#52360") as caught:
        plan(recipe(with_store()), versions=installed(vllm=version))
    assert "use vllm >= 0.28" in str(caught.value.todo)
    assert plan(recipe(with_store()), versions=installed(vllm="0.28.0")).names()


def test_a_store_of_answers_with_drafts_is_a_warning() -> None:
    answers = with_store(save_decode_cache=True)
    assert [w for w in plan(recipe(answers, {"decode": DRAFTS})).warnings if "vllm#51805" in w]
    assert not [w for w in plan(recipe(answers)).warnings if "vllm#51805" in w]
    assert not [w for w in plan(recipe(with_store(), {"engine": DRAFTS})).warnings if "vllm#51805" in w]


def test_a_range_that_is_none_is_the_recipes_fault() -> None:
    with pytest.raises(RecipeError, match="is not a version range"):
        plan(recipe({"requires": {"vllm": "newest"}}))


def test_leaving_out_a_patch_that_is_needed_is_refused() -> None:
    with pytest.raises(RecipeError, match="needs the patch multiconnector-prom-metrics") as caught:
        plan(recipe(with_lmcache(), {"patches": ["mooncake-cpu-device"]}))
    assert "43828" in (caught.value.cause or "")


def test_a_patch_that_this_version_does_not_need_may_be_left_out() -> None:
    needed = [patch.name for patch in REGISTRY if patch.name != "multiconnector-prom-metrics"]
    change = {"patches": needed}
    assert plan(recipe(with_lmcache(), change), versions=installed(vllm="0.33.0")).names()
