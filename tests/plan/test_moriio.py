"""MoRI-IO beyond its golden plan: its limits, and the recipes and versions that may not have it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.cli.status import head
from pdserve.errors import PreflightError, RecipeError
from pdserve.observe.status import StatusView
from pdserve.plan.model import Plan, Versions
from pdserve.recipe.connectors.moriio import CLASS
from pdserve.recipe.model import Recipe
from pdserve.recipe.rules import problems, warnings
from tests.launch.records import recorded_state
from tests.plan.kit import LMCACHE, hosts, on_gpus, plan, recipe, value_of
from tests.plan.shapes import MORIIO, both
from tests.tables import each_row

VERSIONS = Versions(vllm="0.32.0", lmcache="0.5.6", mori="1.2.4")


def on_amd(*changes: dict[str, Any], tp: int = 1) -> Recipe:
    return recipe(on_gpus(tp, tp, "rocm"), both(MORIIO), *changes)


def planned(*changes: dict[str, Any], vllm: str = "0.32.0") -> Plan:
    return plan(on_amd(*changes), *hosts(16), versions=VERSIONS.model_copy(update={"vllm": vllm}))


def test_its_limits_follow_the_proxys_and_no_proxy_is_pinged() -> None:
    decode = planned({"proxy": {"request_timeout_seconds": 600}}).process("decode-0")
    extra = json.loads(value_of(decode, "--kv-transfer-config"))["kv_connector_extra_config"]
    assert {extra[key] for key in ("transfer_timeout", "recv_abort_timeout", "defer_timeout")} == {660}
    assert not {"proxy_ip", "proxy_ping_port"} & extra.keys()


def test_its_patch_cannot_be_left_out() -> None:
    others = [name for name in planned().process("prefill-0").patches if name != "moriio-unread-prompts"]
    with pytest.raises(RecipeError, match="needs the patch moriio-unread-prompts"):
        planned({"patches": others})


@each_row("vllm", ["0.31.0", "0.33.0", "0.27.1"])
def test_only_the_vllm_that_was_read_has_it(vllm: str) -> None:
    with pytest.raises(PreflightError, match="MoRI-IO differs from release to release"):
        planned(vllm=vllm)


def test_it_is_untested_whatever_the_recipe_says_of_itself() -> None:
    """The recipe of this test calls itself tested."""
    built = planned()
    view = StatusView(recorded_state(phase="ready"), built, "ready", "/run/r1", [])
    assert f"untested: {CLASS} ran on no device here, and can corrupt KV (docs/limits.md)" in head(view)
    assert view.to_json()["untested_connectors"] == [CLASS]
    assert any(f"{CLASS} of decode is untested" in text for text in built.warnings)
    assert any("moriio is untested" in problem.what for problem in warnings(on_amd()))


SLOW = {"transfer_timeout_seconds": 30.0}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"platform": "cuda"}, "between AMD GPUs only, and the platform is cuda", "use kind: nixl"),
    ({"decode": {"connector": {"kind": "moriio"}}}, "decode computes on before its KV", "to have it all the same"),
    ({"decode": {"connector": {**MORIIO, **SLOW}}}, "30 s end a transfer while its request may go on", "remove it"),
    (
        {"prefill": {"connector": {**MORIIO, "defer_timeout_seconds": 3659.0}}},
        "the proxy ends one after 3600 s, and decode hears of it up to 60 s later",
        "remove it, or lower proxy.request_timeout_seconds",
    ),
    (
        {"decode": {"connector": {**MORIIO, "recv_abort_timeout_seconds": 5000.0}}},
        "an answer from KV that did not arrive",
        "remove it",
    ),
    ({"proxy": {"kind": "vllm-router"}}, "of vllm-router that is not known", "write kind: pdserve"),
    ({"prefill": {"parallel": {"dp": 2}}}, "prefill has dp 2, and MoRI-IO of vLLM 0.32 needs 1", "write dp: 1"),
    ({"decode": {"parallel": {"tp": 2, "nodes": 2}}}, "decode asks one host for all workers", "write nodes: 1"),
    ({"decode": {"parallel": {"tp": 2}}}, "prefill has tp 1 and decode 2", "write 2 for both"),
    (
        {"decode": {"connector": {"kind": "multi", "of": [MORIIO, LMCACHE]}}},
        "no cache beside it on decode was checked",
        "write kind: moriio alone on decode",
    ),
    (
        {"prefill": {"restart": {"policy": "on-failure"}}},
        "fails every read from the one that takes its place",
        "take the deployment down and up again",
    ),
]


@each_row("change, what, todo", REFUSED)
def test_what_it_cannot_be_with_is_refused(change: dict[str, Any], what: str, todo: str) -> None:
    found = [problem for problem in problems(on_amd(change)) if what in problem.what]
    assert found, [problem.what for problem in problems(on_amd(change))]
    assert todo in (found[0].todo or "")


def test_the_published_shape_has_no_problem_and_a_decode_may_come_back() -> None:
    multi = {"kind": "multi", "of": [MORIIO, LMCACHE]}
    assert problems(on_amd({"prefill": {"connector": multi}, "lmcache": {"l1_size_gb": 1}}, tp=8)) == []
    # vLLM makes the sessions of a new decode anew. What mori does with one was not tried.
    assert problems(on_amd({"decode": {"restart": {"policy": "on-failure"}}})) == []
