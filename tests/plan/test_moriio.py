"""MoRI-IO in a plan: its mapping, its ports, its limits, and the recipes that may not have it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli.status import head
from pdserve.errors import PreflightError, RecipeError
from pdserve.observe.status import StatusView
from pdserve.plan.model import Versions
from pdserve.preflight.engine_packages import check_installed
from pdserve.recipe.connectors.moriio import CLASS
from pdserve.recipe.rules import problems, warnings
from pdserve.run.state import DeploymentState
from pdserve.system.process import new_token
from pdserve.system.procfs import ProcessId
from tests.plan.kit import LMCACHE, hosts, on_gpus, plan, recipe, value_of
from tests.recipe.kit import GPU, refused

MORIIO: dict[str, Any] = {"kind": "moriio", "accept_unsafe_aborts": True}
BOTH: dict[str, Any] = {"prefill": {"connector": MORIIO}, "decode": {"connector": MORIIO}}
VERSIONS = Versions(vllm="0.32.0", lmcache="0.5.6", mori="1.2.4")


def on_amd(*changes: dict[str, Any], tp: int = 1) -> Any:
    return recipe(on_gpus(tp, tp, "rocm"), BOTH, *changes)


def extra_of(wanted: Any, process: str) -> dict[str, Any]:
    built = plan(wanted, *hosts(16), versions=VERSIONS)
    extra: dict[str, Any] = json.loads(value_of(built.process(process), "--kv-transfer-config"))
    return extra


def test_alone_each_side_has_its_ports_and_decode_reads() -> None:
    mapping = extra_of(on_amd(), "decode-0")
    assert mapping == {
        "kv_connector": CLASS,
        "kv_connector_module_path": "pdserve.connectors.moriio",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {
            "host_ip": "192.0.2.1",
            "http_port": 8200,
            "handshake_port": 6302,
            "notify_port": 61006,
            "read_mode": True,
            "backend": "rdma",
            "qp_per_transfer": 1,
            "post_batch_size": -1,
            "num_workers": 1,
            "transfer_timeout": 3660,
            "recv_abort_timeout": 3660,
            "defer_timeout": 3660,
        },
        "kv_load_failure_policy": "fail",
    }


def test_no_proxy_is_pinged() -> None:
    assert not {"proxy_ip", "proxy_ping_port"} & extra_of(on_amd(), "prefill-0")["kv_connector_extra_config"].keys()


def test_each_worker_has_a_port_of_both_kinds_and_the_roles_take_turns() -> None:
    built = plan(on_amd({"prefill": {"instances": 2}}, tp=4), *hosts(16), versions=VERSIONS)
    ports = {name: built.process(name).ports for name in ("prefill-0", "prefill-1", "decode-0")}
    assert [ports["prefill-0"][key] for key in ("handshake", "handshake-3", "notify")] == [6301, 6304, 61005]
    assert [ports["prefill-1"][key] for key in ("handshake", "notify-3")] == [6309, 61016]
    assert ports["decode-0"]["handshake"] == 6305
    assert built.process("prefill-0").reached_by["handshake"] == ("decode",)
    assert built.proxy.protocol == "moriio"


def test_as_first_child_beside_lmcache_on_prefill_as_it_is_published() -> None:
    multi = {"kind": "multi", "of": [MORIIO, LMCACHE]}
    mapping = extra_of(on_amd({"prefill": {"connector": multi}, "lmcache": {"l1_size_gb": 1}}), "prefill-0")
    children = mapping["kv_connector_extra_config"]["connectors"]
    assert [child["kv_connector"] for child in children] == [CLASS, "LMCacheMPConnector"]
    assert (children[0]["kv_role"], children[0]["kv_connector_extra_config"]["handshake_port"]) == ("kv_producer", 6301)


def test_its_limits_follow_the_proxys() -> None:
    wanted = on_amd({"proxy": {"request_timeout_seconds": 600}})
    extra = extra_of(wanted, "decode-0")["kv_connector_extra_config"]
    assert {extra[key] for key in ("transfer_timeout", "recv_abort_timeout", "defer_timeout")} == {660}


def test_its_package_is_asked_for_and_it_uses_rdma() -> None:
    process = plan(on_amd(), *hosts(8), versions=VERSIONS).process("decode-0")
    assert process.packages == ("vllm", "mori")
    assert [connector.rdma_devices for connector in process.connectors] == [()]
    xgmi = {
        "prefill": {"connector": {**MORIIO, "backend": "xgmi"}},
        "decode": {"connector": {**MORIIO, "backend": "xgmi"}},
    }
    (planned,) = plan(on_amd(xgmi), *hosts(8), versions=VERSIONS).process("decode-0").connectors
    assert planned.rdma_devices is None


def test_its_patch_is_on_both_sides_and_cannot_be_left_out() -> None:
    built = plan(on_amd(), *hosts(8), versions=VERSIONS)
    assert all("moriio-unread-prompts" in built.process(name).patches for name in ("prefill-0", "decode-0"))
    others = [name for name in built.process("prefill-0").patches if name != "moriio-unread-prompts"]
    with pytest.raises(RecipeError, match="needs the patch moriio-unread-prompts"):
        plan(on_amd({"patches": others}), *hosts(8), versions=VERSIONS)


def test_it_is_untested_whatever_the_recipe_says_of_itself() -> None:
    assert any(
        f"{CLASS} of decode is untested" in text for text in plan(on_amd(), *hosts(8), versions=VERSIONS).warnings
    )
    assert any("moriio is untested" in problem.what for problem in warnings(on_amd()))


@pytest.mark.parametrize("vllm", ["0.31.0", "0.33.0", "0.27.1"])
def test_only_the_vllm_that_was_read_has_it(vllm: str) -> None:
    with pytest.raises(PreflightError, match="MoRI-IO differs from release to release"):
        plan(on_amd(), *hosts(8), versions=VERSIONS.model_copy(update={"vllm": vllm}))


def test_preflight_asks_for_its_library() -> None:
    wanted = on_amd({"engine": {"env": {"LD_LIBRARY_PATH": "/opt"}}})
    built = plan(wanted, *hosts(8), versions=VERSIONS)
    with pytest.raises(PreflightError, match=r"not installed for .*: MoRI") as caught:
        check_installed(VERSIONS.model_copy(update={"mori": None}), built, wanted)
    assert "inside an image that has it" in (caught.value.todo or "")


def test_status_says_that_it_ran_nowhere() -> None:
    """The recipe of this test calls itself tested."""
    built = plan(on_amd(), *hosts(8), versions=VERSIONS)
    state = DeploymentState(
        token=new_token(),
        name="test",
        run_id="r1",
        phase="ready",
        host="host0",
        launcher=ProcessId(pid=1, start_ticks=1),
        nodes={},
        processes={},
        endpoint="http://127.0.0.1:8000",
        started_at=0.0,
    )
    view = StatusView(state, built, "ready", "/run/r1", [])
    assert f"untested: {CLASS} ran on no device here, and can corrupt KV (docs/limits.md)" in head(view)
    assert view.to_json()["untested_connectors"] == [CLASS]


SLOW = {"transfer_timeout_seconds": 30.0}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"platform": "cuda"}, "between AMD GPUs only, and the platform is cuda", "use kind: nixl"),
    ({"platform": "cpu"}, "between AMD GPUs only, and the platform is cpu", "use kind: nixl"),
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
    ({"decode": {"parallel": {"pp": 2}}}, "decode has pp 2", "write pp: 1"),
    ({"prefill": {"parallel": {"pcp": 2}}}, "prefill has pcp 2", "write pcp: 1"),
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


@pytest.mark.parametrize(("change", "what", "todo"), REFUSED, ids=[what[:40] for _, what, _ in REFUSED])
def test_what_it_cannot_be_with_is_refused(change: dict[str, Any], what: str, todo: str) -> None:
    found = [problem for problem in problems(on_amd(change)) if what in problem.what]
    assert found, [problem.what for problem in problems(on_amd(change))]
    assert todo in (found[0].todo or "")


def test_the_published_shape_has_no_problem() -> None:
    multi = {"kind": "multi", "of": [MORIIO, LMCACHE]}
    assert problems(on_amd({"prefill": {"connector": multi}, "lmcache": {"l1_size_gb": 1}}, tp=8)) == []


def test_a_decode_may_come_back() -> None:
    """vLLM makes the sessions of a new decode anew. What mori does with one was not tried."""
    assert problems(on_amd({"decode": {"restart": {"policy": "on-failure"}}})) == []


def test_without_acceptance_the_line_to_write_is_named_with_its_place(tmp_path: Path) -> None:
    message = refused(
        tmp_path,
        GPU,
        "platform=rocm",
        "prefill.connector={kind: moriio, accept_unsafe_aborts: true}",
        "decode.connector={kind: moriio}",
        "lmcache=null",
    )
    assert "decode.connector: MoRIIOConnector: in vllm 0.32 decode computes on" in message
    assert "--set decode.connector.accept_unsafe_aborts=true" in message
