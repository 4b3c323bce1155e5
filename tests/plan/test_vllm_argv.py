"""The exact command line of an engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.recipe.flags import flag_words
from tests.plan.kit import hosts, on_gpus, plan, recipe, value_of, with_lmcache


def test_on_a_cpu_the_api_server_module_is_started() -> None:
    """The CPU distribution is not called vllm, and `vllm serve` asks for that name's metadata."""
    argv = plan(recipe(), python="/opt/venv/bin/python").process("prefill-0").argv
    assert argv[:5] == (
        "/opt/venv/bin/python",
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        "/srv/recipes/models/tiny",
    )


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_on_gpus_it_is_vllm_serve(platform: str) -> None:
    change = {"model": {"path": None, "id": "org/model", "revision": "abc"}}
    argv = plan(recipe(on_gpus(platform=platform), change), *hosts(2)).process("prefill-0").argv
    assert argv[:5] == ("python", "-m", "vllm.entrypoints.cli.main", "serve", "org/model")
    assert argv[argv.index("--revision") + 1] == "abc"


def test_a_command_of_the_recipe_replaces_the_program_and_keeps_the_flags() -> None:
    argv = plan(recipe({"engine": {"command": ["numactl", "-N", "0", "engine"]}})).process("decode-0").argv
    assert argv[:6] == ("numactl", "-N", "0", "engine", "--model", "/srv/recipes/models/tiny")
    assert "--kv-transfer-config" in argv


def test_another_interpreter_runs_engines_and_lmcache_but_not_the_proxy() -> None:
    built = plan(recipe(with_lmcache(), {"engine": {"python": "/opt/vllm/python"}}), python="/usr/bin/python3")
    assert {p.name: p.argv[0] for p in built.processes} == {
        "lmcache-0": "/opt/vllm/python",
        "prefill-0": "/opt/vllm/python",
        "decode-0": "/opt/vllm/python",
        "proxy": "/usr/bin/python3",
    }


def test_engines_listen_on_their_nodes_address() -> None:
    process = plan(recipe(on_gpus(8, 8)), *hosts(8, 8)).process("decode-0")
    assert value_of(process, "--host") == "192.0.2.2"
    assert value_of(process, "--port") == "8200"
    assert value_of(process, "--served-model-name") == "tiny"


def test_parallelism_becomes_flags_and_ones_are_left_out() -> None:
    parallel = {"tp": 2, "pp": 2, "dp": 2, "ep": True}
    built = plan(recipe(on_gpus(), {"prefill": {"parallel": parallel}}), *hosts(16))
    prefill, decode = built.process("prefill-0"), built.process("decode-0")
    assert value_of(prefill, "--tensor-parallel-size") == "2"
    assert value_of(prefill, "--pipeline-parallel-size") == "2"
    assert value_of(prefill, "--data-parallel-size") == "2"
    assert value_of(prefill, "--api-server-count") == "1"
    assert "--enable-expert-parallel" in prefill.argv
    assert value_of(decode, "--tensor-parallel-size") == "1"
    assert not {"--pipeline-parallel-size", "--data-parallel-size", "--enable-expert-parallel"} & set(decode.argv)


def test_what_verify_needs_is_on() -> None:
    for name in ("prefill-0", "decode-0"):
        argv = plan(recipe()).process(name).argv
        assert "--enable-prompt-tokens-details" in argv
        assert "--disable-uvicorn-access-log" in argv


def test_prefix_caching_is_on_where_lmcache_is_attached() -> None:
    built = plan(recipe(with_lmcache()))
    assert "--enable-prefix-caching" in built.process("prefill-0").argv
    assert "--enable-prefix-caching" not in built.process("decode-0").argv


def test_a_roles_flags_win_over_the_shared_ones_and_null_drops_a_flag() -> None:
    change = {
        "engine": {"args": {"max-model-len": 4096, "enforce-eager": True, "disable-uvicorn-access-log": None}},
        "decode": {"args": {"max-model-len": 8192, "enforce-eager": None}},
    }
    built = plan(recipe(change))
    prefill, decode = built.process("prefill-0"), built.process("decode-0")
    assert value_of(prefill, "--max-model-len") == "4096"
    assert value_of(decode, "--max-model-len") == "8192"
    assert "--enforce-eager" in prefill.argv
    assert "--enforce-eager" not in decode.argv
    assert "--disable-uvicorn-access-log" not in prefill.argv


@pytest.mark.parametrize(
    ("value", "arguments"),
    [
        (True, ["--flag"]),
        (False, ["--no-flag"]),
        (None, []),
        (3, ["--flag", "3"]),
        (-1, ["--flag=-1"]),
        (0.9, ["--flag", "0.9"]),
        ("a b; $(c)", ["--flag", "a b; $(c)"]),
        ("-x", ["--flag=-x"]),
        ("", ["--flag", ""]),
        ([1, "b", {"c": True}], ["--flag", "1", "b", '{"c": true}']),
        ({"a": [1, None]}, ["--flag", '{"a": [1, null]}']),
    ],
)
def test_every_type_of_value_has_one_form(value: Any, arguments: list[str]) -> None:
    assert list(flag_words({"flag": value})) == arguments


SPANNING = {"prefill": {"parallel": {"tp": 16, "nodes": 2}}}


def test_an_instance_that_spans_nodes_has_a_leader_and_headless_followers() -> None:
    built = plan(recipe(on_gpus(1, 8), SPANNING), *hosts(8, 8, 8))
    leader, follower = built.process("prefill-0"), built.process("prefill-0-node1")
    for rank, process in enumerate((leader, follower)):
        assert value_of(process, "--nnodes") == "2"
        assert value_of(process, "--node-rank") == str(rank)
        assert value_of(process, "--master-addr") == "192.0.2.1"
        assert value_of(process, "--master-port") == "29500"
        assert value_of(process, "--tensor-parallel-size") == "16"
        assert process.devices == tuple(range(8))
    assert "--headless" not in leader.argv
    assert "--headless" in follower.argv
    assert "--port" not in follower.argv
    assert follower.probe is None
    assert follower.node == "host1"
    assert leader.ports == {"http": 8100, "bootstrap": 8998, "dp_master": 29500}
    assert follower.ports == {}
    assert (follower.start_stage, follower.stop_stage) == (leader.start_stage, leader.stop_stage)


def test_followers_share_the_leaders_bootstrap_and_keep_their_own_address() -> None:
    built = plan(recipe(on_gpus(1, 8), SPANNING, {"ports": {"bootstrap": 9100}}), *hosts(8, 8, 8))
    leader, follower = built.process("prefill-0").env.set, built.process("prefill-0-node1").env.set
    assert leader["VLLM_MOONCAKE_BOOTSTRAP_PORT"] == follower["VLLM_MOONCAKE_BOOTSTRAP_PORT"] == "9100"
    assert (leader["VLLM_HOST_IP"], follower["VLLM_HOST_IP"]) == ("192.0.2.1", "192.0.2.2")
    assert leader["PYTHONHASHSEED"] == follower["PYTHONHASHSEED"]


def test_data_parallelism_over_nodes_pins_its_rpc_port_too() -> None:
    change = {"prefill": {"parallel": {"tp": 8, "dp": 2, "nodes": 2}}}
    process = plan(recipe(on_gpus(1, 8), change), *hosts(8, 8, 8)).process("prefill-0-node1")
    assert value_of(process, "--data-parallel-address") == "192.0.2.1"
    assert value_of(process, "--data-parallel-rpc-port") == "29501"


def test_the_connector_is_one_argument_of_valid_json() -> None:
    process = plan(recipe(with_lmcache())).process("prefill-0")
    assert json.loads(value_of(process, "--kv-transfer-config"))["kv_connector"] == "MultiConnector"
