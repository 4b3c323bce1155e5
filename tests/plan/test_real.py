"""What the plan says, read by the engines' own parsers and libraries: no flag, class or variable is imagined."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from pdserve.plan.process import Process
from pdserve.recipe.vllm_names import READ_IN_OTHER_PLACES, VARIABLES
from pdserve.roles import ENGINE_ROLES
from tests.plan.golden import RECIPES, ROOT, shipped_plan
from tests.plan.kit import plan, recipe, value_of, with_lmcache
from tests.plan.shapes import SHAPES, shape

pytestmark = pytest.mark.real


def arguments(process: Process) -> list[str]:
    """What follows `python -m module`, without vLLM's subcommand."""
    rest = list(process.argv[3:])
    return rest[1:] if rest[0] == "serve" else rest


def test_the_known_variables_are_those_of_the_installed_vllm() -> None:
    """Read from the source: no engine is imported."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    tree = ast.parse((folder / "envs.py").read_text())
    (table,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "environment_variables"
    ]
    assert isinstance(table, ast.Dict)
    names = {ast.literal_eval(key) for key in table.keys if key is not None}
    assert {name for name in names if name.startswith("VLLM_")} == VARIABLES
    reading = re.compile(r"""(?:environ(?:\.get)?[\[(]|getenv\()\s*["'](VLLM_[A-Z0-9_]+)""")
    read = {name for path in folder.rglob("*.py") for name in reading.findall(path.read_text())}
    assert read - VARIABLES == READ_IN_OTHER_PLACES


def ask(script: str, stdin: str = "", **env: str) -> dict[str, Any]:
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false"}
    done = subprocess.run(
        [sys.executable, "-m", f"tests.plan.{script}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **quiet, **env},
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    parsed: dict[str, Any] = json.loads(line.removeprefix("ANSWER "))
    return parsed


@pytest.fixture(scope="module")
def built() -> dict[str, Process]:
    """Every process of every plan, by plan and name."""
    plans = {**{name: shipped_plan(name) for name in RECIPES}, **{name: shape(name) for name in SHAPES}}
    return {f"{name}/{process.name}": process for name, plan in plans.items() for process in plan.processes}


def extra_keys(processes: Iterable[Process]) -> dict[str, list[str]]:
    """Connector class -> the keys that any of the plans gives it."""
    keys: dict[str, set[str]] = defaultdict(set)
    todo = [json.loads(value_of(p, "--kv-transfer-config")) for p in processes if p.role in ENGINE_ROLES]
    while todo:
        config = todo.pop()
        extra = config["kv_connector_extra_config"]
        keys[config["kv_connector"]] |= extra.keys()
        todo += extra.get("connectors", [])
    return {name: sorted(names) for name, names in keys.items()}


@pytest.fixture(scope="module")
def answer(built: dict[str, Process]) -> dict[str, Any]:
    """What the engines made of all of them."""
    asked = {
        "vllm": {key: arguments(p) for key, p in built.items() if p.role in ENGINE_ROLES},
        "lmcache": {key: arguments(p) for key, p in built.items() if p.role == "lmcache"},
        "keys": extra_keys(built.values()),
        "stores": {key: text for key, p in built.items() for text in p.files.values() if p.is_engine},
        "offloading": [
            json.loads(value_of(p, "--kv-transfer-config"))["kv_connector_extra_config"]
            for key, p in built.items()
            if key == "offloading/aggregated-0"
        ],
    }
    return ask("real_parsers", json.dumps(asked))


def test_vllm_understands_every_command_line(answer: dict[str, Any]) -> None:
    assert {key: parsed["error"] for key, parsed in answer["vllm"].items() if "error" in parsed} == {}
    assert len(answer["vllm"]) > 10


def test_vllm_reads_what_the_plan_meant(answer: dict[str, Any], built: dict[str, Process]) -> None:
    for key, parsed in answer["vllm"].items():
        assert parsed["enable_prompt_tokens_details"] is True
        assert parsed["disable_uvicorn_access_log"] is True
        if "http" in built[key].ports:
            assert parsed["port"] == built[key].ports["http"]
    tiny = answer["vllm"]["tiny-cpu/prefill-0"]
    assert (tiny["served_model_name"], tiny["max_model_len"], tiny["enforce_eager"]) == (["tiny"], 4096, True)
    assert tiny["kv_transfer_config"]["kv_load_failure_policy"] == "recompute"
    children = tiny["kv_transfer_config"]["kv_connector_extra_config"]["connectors"]
    assert [child["kv_connector"] for child in children] == ["MooncakeConnector", "LMCacheMPConnector"]


def test_vllm_reads_the_flags_of_an_instance_that_spans_nodes(answer: dict[str, Any]) -> None:
    follower = answer["vllm"]["spanning/prefill-0-node1"]
    assert follower["headless"] is True
    assert (follower["nnodes"], follower["node_rank"], follower["master_addr"]) == (2, 1, "192.0.2.1")
    assert (follower["tensor_parallel_size"], follower["data_parallel_size"]) == (4, 2)
    assert follower["data_parallel_rpc_port"] == 29501
    assert follower["enable_expert_parallel"] is True


def test_vllm_reads_the_flags_of_a_server_of_some_ranks(answer: dict[str, Any]) -> None:
    second = answer["vllm"]["hybrid/prefill-0-node1"]
    assert (second["data_parallel_hybrid_lb"], second["headless"]) == (True, False)
    assert (second["data_parallel_size"], second["data_parallel_size_local"]) == (8, 4)
    assert (second["data_parallel_start_rank"], second["data_parallel_rank"]) == (4, None)
    assert (second["data_parallel_address"], second["data_parallel_rpc_port"]) == ("192.0.2.1", 29500)
    assert (second["prefill_context_parallel_size"], second["api_server_count"]) == (2, 3)


def test_vllm_reads_the_flags_of_the_server_of_one_rank(answer: dict[str, Any]) -> None:
    last = answer["vllm"]["deepseek-r1-wide-ep/decode-0-rank15"]
    assert (last["data_parallel_external_lb"], last["data_parallel_rank"]) == (True, 15)
    assert (last["all2all_backend"], last["moe_backend"]) == ("deepep_low_latency", "deep_gemm")
    assert (last["enable_dbo"], last["dbo_decode_token_threshold"], last["max_num_seqs"]) == (True, 32, 256)


def test_lmcache_understands_every_command_line(answer: dict[str, Any], built: dict[str, Process]) -> None:
    assert {key: parsed["error"] for key, parsed in answer["lmcache"].items() if "error" in parsed} == {}
    for key, parsed in answer["lmcache"].items():
        assert (parsed["port"], parsed["http_port"]) == (built[key].ports["request"], built[key].ports["http"])
        assert parsed["host"] == parsed["http_host"] == "127.0.0.1"
        assert parsed["eviction_policy"] == "LRU"
    assert answer["lmcache"]["tiny-cpu/lmcache-0"]["l1_use_lazy"] is False
    assert answer["lmcache"]["kimi-mi355x/lmcache-0"]["l1_init_size_gb"] == 20
    assert answer["lmcache"]["one-cpu/lmcache-0"]["shm_name"] == "pool"
    assert answer["lmcache_connector"] is True


def test_every_key_of_a_connector_is_read_by_its_code(answer: dict[str, Any]) -> None:
    """The classes are looked up in vLLM's registry; a key that no code mentions would be ignored in silence."""
    assert answer["unread"] == {
        "MultiConnector": [],
        "MooncakeConnector": [],
        "NixlConnector": [],
        "MoRIIOConnector": [],
        "LMCacheMPConnector": [],
        "MooncakeStoreConnector": [],
        "OffloadingConnector": [],
    }
    assert answer["control"] == ["no_such_key"]


def test_vllm_reads_the_file_of_a_store_as_it_was_meant(answer: dict[str, Any]) -> None:
    assert answer["stores"]["tiny-cpu-mooncake-store/prefill-0"] == {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": "127.0.0.1:5051",
        "protocol": "tcp",
        "device_name": "",
        "mode": "embedded",
        "global_segment_size": 1 << 30,
        "local_buffer_size": 1 << 28,
        "enable_offload": False,
        "tenant_id": "default",
    }
    published = answer["stores"]["minimax-m3-gb300-store/decode-2"]
    assert (published["protocol"], published["device_name"]) == ("rdma", "mlx5_0,mlx5_1,mlx5_2,mlx5_3")
    assert published["master_server_address"] == "198.51.100.1:5051"
    assert (published["global_segment_size"], published["local_buffer_size"]) == (200 << 30, 4 << 30)


def test_vllm_has_what_offloading_asks_for(answer: dict[str, Any]) -> None:
    """No CPU can build its worker: the classes that read its settings are asked."""
    assert answer["offloading"] == [["CPUOffloadingSpec", "ARCCachePolicy", 2]]


def test_every_vllm_variable_exists(answer: dict[str, Any], built: dict[str, Process]) -> None:
    """Some are read by the ROCm or the CPU platform only, and vLLM lists those too."""
    used = {name for process in built.values() for name in process.env.set if name.startswith("VLLM_")}
    assert used - set(answer["environment"]) == set()


def test_mooncake_keeps_to_the_ports_that_the_plan_gives_an_instance() -> None:
    env = plan(recipe(with_lmcache(), {"ports": {"transfer": 23500}})).process("prefill-0").env.set
    first, last = int(env["MC_MIN_RPC_PORT"]), int(env["MC_MAX_RPC_PORT"])
    variables = {name: value for name, value in env.items() if name.startswith("MC_")}
    engine = ask("real_transfer_ports", **variables)
    assert engine["started"]
    assert engine["rpc"] in engine["listening"]
    assert len(engine["listening"]) == 2
    assert all(first <= port <= last for port in engine["listening"])
