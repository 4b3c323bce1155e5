"""NIXL's push mode in a plan: its mapping, its patch, and what a recipe must say and cannot have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli.observe.status import head
from pdserve.recipe.connectors.nixl import OPEN_CASES, NixlPushSection
from tests.plan.kit import NIXL_PUSH, plan, recipe, value_of
from tests.recipe.kit import CPU, GPU, load, refused
from tests.watch.test_frames import frame

BOTH = {"prefill": {"connector": NIXL_PUSH}, "decode": {"connector": NIXL_PUSH}}
WORDS = "{kind: nixl-push, accept_open_cases: true}"
SET = ("lmcache=null", f"prefill.connector={WORDS}", f"decode.connector={WORDS}")


def config(name: str, **section: Any) -> dict[str, Any]:
    change = {role: {"connector": NIXL_PUSH | section} for role in ("prefill", "decode")}
    mapping: dict[str, Any] = json.loads(value_of(plan(recipe(change)).process(name), "--kv-transfer-config"))
    return mapping


def test_each_side_is_named_and_decode_gives_up_in_time() -> None:
    assert config("prefill-0") == {
        "kv_connector": "NixlPushConnector",
        "kv_role": "kv_producer",
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {
            "backends": ["UCX"],
            "kv_lease_duration": 30,
            "push_registration_timeout": 480,
        },
        "kv_load_failure_policy": "fail",
    }
    decode = config("decode-0", registration_seconds=900, lease_seconds=60)
    assert decode["kv_role"] == "kv_consumer"
    assert decode["kv_connector_extra_config"]["push_registration_timeout"] == 900
    assert decode["kv_connector_extra_config"]["kv_lease_duration"] == 60


def test_both_engines_have_the_patch_and_the_proxy_sends_both_legs() -> None:
    built = plan(recipe(BOTH))
    for name in ("prefill-0", "decode-0"):
        assert "nixl-push" in built.process(name).patches
        assert "nixl-abandoned-kv" not in built.process(name).patches
    assert built.proxy is not None
    assert built.proxy.protocol == "nixl-push"


def test_the_plan_says_that_it_is_untested() -> None:
    warnings = plan(recipe(BOTH)).warnings
    assert "NixlPushConnector of prefill is untested: no device that it needs was at hand (docs/limits.md)" in warnings


def test_status_says_that_it_is_untested() -> None:
    view = frame(plan(recipe(BOTH))).view
    assert view is not None
    said = "untested: NixlPushConnector ran on no device here, and can corrupt KV (docs/limits.md)"
    assert said in head(view)
    assert view.to_json()["untested_connectors"] == ["NixlPushConnector"]


def test_each_role_connects_to_the_side_channel_of_the_other() -> None:
    (port,) = (port for port in NixlPushSection.ABOUT.ports)
    assert port.reached_by == {"prefill": ("decode",), "decode": ("prefill",)}


def test_a_recipe_that_accepts_the_open_cases_is_warned_of_them(tmp_path: Path) -> None:
    assert any(OPEN_CASES in warning for warning in load(tmp_path, CPU, *SET).warnings)


def test_without_that_word_it_is_refused_with_what_is_open(tmp_path: Path) -> None:
    message = refused(
        tmp_path, CPU, SET[0], "prefill.connector={kind: nixl-push}", "decode.connector={kind: nixl-push}"
    )
    assert f"nixl-push {OPEN_CASES}" in message
    assert "set accept_open_cases: true" in message


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("prefill.parallel.tp=4", "decode.parallel.tp=2"), "the same tensor parallel size on prefill and decode"),
        (("prefill.parallel.pp=2",), "prefill.parallel.pp: nixl-push does not go with pipeline stages"),
        (("prefill.parallel.pcp=2",), "prefill.parallel.pcp: nixl-push does not go with prefill context parallelism"),
        (("proxy.kind=vllm-router",), "vllm-router cannot send both legs of a push"),
        (("decode.connector={kind: nixl}",), "decode uses nixl, prefill uses nixl-push"),
    ],
)
def test_what_the_patch_is_not_safe_with_is_refused(tmp_path: Path, options: tuple[str, ...], what: str) -> None:
    assert what in refused(tmp_path, GPU, *SET, *options)


def test_as_a_raw_mapping_it_is_refused(tmp_path: Path) -> None:
    raw = "{kind: raw, config: {kv_connector: NixlPushConnector}}"
    message = refused(tmp_path, CPU, "lmcache=null", f"prefill.connector={raw}", f"decode.connector={raw}")
    assert "use kind: nixl-push" in message
