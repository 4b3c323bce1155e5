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

from pdserve.importing.command_line import LISTED
from pdserve.plan.model import Plan
from pdserve.plan.process import Process
from pdserve.recipe.vllm_names import READ_IN_OTHER_PLACES, VARIABLES
from pdserve.roles import ENGINE_ROLES
from tests.plan.golden import RECIPES, ROOT, shipped_plan
from tests.plan.kit import plan, recipe, value_of, with_lmcache
from tests.plan.shapes import SHAPES, shape
from tests.tables import each_row

pytestmark = pytest.mark.real


def arguments(process: Process) -> list[str]:
    """What follows `python -m module`, without vLLM's subcommand."""
    rest = list(process.argv[3:])
    return rest[1:] if rest[0] == "serve" else rest


PLANS: dict[str, Plan] = {
    name: planned for name in RECIPES if (planned := shipped_plan(name)).platform in ("rocm", "cuda")
}
ENGINES: dict[str, Process] = {
    f"{name}/{process.name}": process
    for name, planned in PLANS.items()
    for process in planned.processes
    if process.role in ENGINE_ROLES
}
BROKEN = {
    "block size 0": ["--block-size", "0"],
    "no such dtype": ["--kv-cache-dtype", "fp7"],
    "no such tool parser": ["--enable-auto-tool-choice", "--tool-call-parser", "kimi_k0"],
    "no such reasoning parser": ["--reasoning-parser", "kimi_k0"],
    "tools without a parser": ["--enable-auto-tool-choice"],
    "more tokens a step than fit": ["--max-num-seqs", "512", "--max-num-batched-tokens", "16"],
}


def vllm_folder() -> Path:
    """The installed package: read, not imported."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def test_the_known_variables_are_those_of_the_installed_vllm() -> None:
    """Read from the source: no engine is imported."""
    folder = vllm_folder()
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
        "configs": {
            **{name: arguments(process) for name, process in ENGINES.items()},
            **{name: ["m", *flags] for name, flags in BROKEN.items()},
        },
    }
    return ask("real_parsers", json.dumps(asked))


@each_row("engine, least", [("vllm", 30), ("lmcache", 5)])
def test_every_command_line_is_understood(answer: dict[str, Any], engine: str, least: int) -> None:
    assert {name: error for name, error in answer[engine].items() if error} == {}
    assert len(answer[engine]) > least
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
    published = answer["stores"]["minimax-m3-gb300-store/decode-2"]
    assert (published["protocol"], published["device_name"]) == ("rdma", "mlx5_0,mlx5_1,mlx5_2,mlx5_3")
    assert published["master_server_address"] == "198.51.100.1:5051"
    assert (published["global_segment_size"], published["local_buffer_size"]) == (200 << 30, 4 << 30)


def test_vllm_has_what_offloading_asks_for(answer: dict[str, Any]) -> None:
    """No CPU can build its worker: the classes that read its settings are asked."""
    assert answer["offloading"] == [["CPUOffloadingSpec", "ARCCachePolicy", 2]]


def test_the_listed_flags_are_those_of_the_installed_vllm(answer: dict[str, Any]) -> None:
    names = answer["flags"]
    assert set(names["whole"]) | {*names["switches"], *names["lists"]} == LISTED.whole
    assert set(names["switches"]) == LISTED.switches
    assert set(names["lists"]) == LISTED.lists
    assert {**names["short"], "O": "optimization-level"} == dict(LISTED.short), "the parser writes -O3 out itself"


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


@each_row("name", ENGINES)
def test_vllm_configures_itself_by_the_command(answer: dict[str, Any], name: str) -> None:
    engine, made = ENGINES[name], answer["configs"][name]
    assert "error" not in made, made["error"]
    instance = PLANS[name.partition("/")[0]].instance_of(engine.name)
    assert made["world_size"] == sum(process.ranks.workers for process in instance if process.ranks is not None)
    if module := json.loads(value_of(engine, "--kv-transfer-config")).get("kv_connector_module_path"):
        assert made["connector"] == module


@each_row("name", BROKEN)
def test_what_vllm_would_refuse_is_refused_here(answer: dict[str, Any], name: str) -> None:
    assert "error" in answer["configs"][name], "the check could not fail"


@each_row("path, text", [
    # A decode of NIXL refuses stages, and divides its blocks by prefill's.
    ("v1/nixl/base_worker.py", 'kv_role == "kv_consumer":\n                raise NotImplementedError('),
    ("utils.py", "assert self.block_size % remote_block_size == 0, ("),
    # Mooncake pairs blocks one to one.
    ("v1/mooncake/mooncake_connector.py", "local_group = local_group[-n_remote:] if n_remote > 0 else []"),
])  # fmt: skip
def test_what_rules_of_recipes_rest_on_is_in_the_code(path: str, text: str) -> None:
    assert text in (vllm_folder() / "distributed/kv_transfer/kv_connector" / path).read_text()
