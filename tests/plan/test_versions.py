"""What the table of versions refuses, warns about and lets pass."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.errors import PreflightError, RecipeError
from pdserve.patches.registry import REGISTRY
from pdserve.plan.model import Plan, Versions
from tests.plan.kit import MULTI, NIXL, VERSIONS, aggregated, on_gpus, plan, recipe, with_lmcache
from tests.plan.shapes import both
from tests.tables import each_row

Installed = dict[str, str | None]
KNOWN_CODE = {"vllm": "0.32.0", "lmcache": "0.5.6"}
PLAIN: dict[str, Any] = {}
L2 = with_lmcache(l2=[{"type": "fs", "base_path": "/cache"}])
RDMA = both({"kind": "mooncake", "protocol": "rdma"})
STORE: dict[str, Any] = {"kind": "mooncake-store"}
DRAFTS = {"args": {"speculative-config": {"method": "mtp", "num_speculative_tokens": 2}}}
IN_TURN = {"args": {"async-scheduling": False}}


def installed(**versions: str | None) -> Versions:
    return VERSIONS.model_copy(update=versions)


def with_store(**decode: Any) -> dict[str, Any]:
    """Prefill stores; `decode`: its own store, if any."""
    return {
        "prefill": {"connector": {"kind": "multi", "of": [NIXL, STORE]}},
        "decode": {"connector": {"kind": "multi", "of": [NIXL, STORE | decode]} if decode else NIXL},
        "mooncake_store": {"segment_gib": 1, "protocol": "tcp"},
    }


def planned(change: dict[str, Any], versions: Installed, more: dict[str, Any] | None = None) -> Plan:
    return plan(recipe(change, more or {}), versions=installed(**versions))


@each_row(
    "change, versions, message",
    [
        (with_lmcache(), {"vllm": "0.24.0"}, "vllm#46865"),
        (
            with_lmcache(on=["prefill", "decode"]) | {"decode": {"connector": MULTI}},
            {"lmcache": "0.5.4"},
            "lmcache#4355",
        ),
        (with_lmcache(), {"lmcache": "0.4.4"}, "no connector for its MP server"),
        (with_lmcache(per="tp-rank"), {"lmcache": "0.4.9"}, "knows one server only"),
        (aggregated(), {"vllm": "0.21.0"}, "does not import on this vllm"),
        (with_store(), {"vllm": "0.27.1"}, "vllm#52360"),
        (PLAIN, {"mooncake": "0.3.11.post1"}, "Mooncake#2850"),
    ],
)
def test_what_never_works_is_refused_with_the_reason(change: dict[str, Any], versions: Installed, message: str) -> None:
    with pytest.raises(PreflightError, match=message) as caught:
        planned(change, versions)
    assert caught.value.todo


@each_row(
    "change, versions",
    [
        (with_store(), {"vllm": "0.28.0"}),
        (PLAIN, {"mooncake": "0.3.12.post1"}),
        ({**RDMA, "platform": "cuda"}, {"mooncake": "0.3.11.post1"}),
        ({"requires": {"vllm": ">=0.33"}}, {"vllm": "0.33.1.dev5+g1234abc"}),
        ({"requires": {"vllm": ">=0.33"}}, {"vllm": None}),
        ({"requires": {"vllm": ">=0.33"}}, {"vllm": "a-branch"}),
    ],
)
def test_what_works_or_is_not_known_is_let_pass(change: dict[str, Any], versions: Installed) -> None:
    assert planned(change, versions).names()


@each_row(
    "change, versions, message",
    [
        (PLAIN, {"vllm": "0.29.1"}, "vllm#35943"),
        (PLAIN, {"vllm": "0.40.0"}, "vllm 0.40.0 is outside what is known"),
        (PLAIN, {"vllm": None}, "vllm is not installed here"),
        (PLAIN, {"mooncake": None}, "mooncake is not installed here"),
        (with_lmcache(), {"lmcache": "0.6.1"}, "lmcache 0.6.1 is outside what is known"),
        # Endless preemption of three releases
        (PLAIN, {"vllm": "0.27.0"}, "vllm#49674"),
        (PLAIN, {"vllm": "0.29.0"}, "async-scheduling: false"),
        ({"prefill": IN_TURN}, {"vllm": "0.28.0"}, "vllm#49674"),
        # Transfers that were reported to mix KV
        ({**RDMA, "platform": "cuda"}, {}, "vllm#44238"),
        (L2, {}, "lmcache#5263"),
        (L2, {"lmcache": "0.5.5"}, "lmcache#4991"),
        ({**with_store(save_decode_cache=True), "engine": DRAFTS}, {}, "vllm#51805"),
    ],
)
def test_what_is_doubtful_is_a_warning(change: dict[str, Any], versions: Installed, message: str) -> None:
    assert [warning for warning in planned(change, versions).warnings if message in warning]


@each_row(
    "change, versions, message",
    [
        (with_lmcache(), {}, ""),
        (PLAIN, {"lmcache": None, "nixl": None}, ""),
        ({"engine": IN_TURN}, {"vllm": "0.27.1"}, "vllm#49674"),
        (PLAIN, {"vllm": "0.30.0"}, "vllm#49674"),
        (on_gpus(), {}, "vllm#44238"),
        ({**both(NIXL), "platform": "cuda"}, {}, "vllm#44238"),
        (L2, {}, "lmcache#4991"),
        (with_store(save_decode_cache=True), {}, "vllm#51805"),
        ({**with_store(), "engine": DRAFTS}, {}, "vllm#51805"),
    ],
)
def test_what_is_tested_or_not_in_use_is_no_warning(change: dict[str, Any], versions: Installed, message: str) -> None:
    assert not [warning for warning in planned(change, versions).warnings if message in warning]


def test_an_installed_version_outside_requires_is_this_machines_fault() -> None:
    with pytest.raises(PreflightError) as caught:
        plan(recipe({"requires": {"vllm": ">=0.33"}}))
    assert caught.value.what == "vllm 0.32.0 is installed, the recipe requires >=0.33"
    assert caught.value.where == "requires.vllm"
    with pytest.raises(RecipeError, match="is not a version range"):
        plan(recipe({"requires": {"vllm": "newest"}}))


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


def test_a_patch_may_be_left_out_only_where_this_version_does_not_need_it() -> None:
    with pytest.raises(RecipeError, match="needs the patch multiconnector-prom-metrics") as caught:
        plan(recipe(with_lmcache(), {"patches": ["mooncake-cpu-device"]}))
    assert "43828" in (caught.value.cause or "")
    needed = [patch.name for patch in REGISTRY if patch.name != "multiconnector-prom-metrics"]
    assert planned(with_lmcache(), {"vllm": "0.33.0"}, {"patches": needed}).names()
