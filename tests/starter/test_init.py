"""`pdserve init`: every recipe of it is valid, its sizes are the planner's, and what cannot be is refused."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

from pdserve.operations.init_recipe import FirstRecipe, first_recipe
from pdserve.operations.plan_recipe import plan_for
from pdserve.recipe.load.loader import LoadedRecipe, load_recipe
from pdserve.starter.draft import HARDWARE
from pdserve.starter.goal import Goal
from tests.messages.kit import Outcome, run
from tests.models.test_files import safetensors, tensor
from tests.plan.kit import VERSIONS
from tests.tables import each_row

GPUS = [name for name, hardware in HARDWARE.items() if hardware.devices]


def typed(folder: Path, *words: str) -> Outcome:
    return run(("init", *words), folder, {})


def made(
    name: Path | str, hardware: str, goal: Goal = Goal.THROUGHPUT, nodes: int = 1, devices: int | None = None
) -> FirstRecipe:
    home = {"HOME": str(Path(name).parent)}
    return first_recipe(str(name), hardware, nodes=nodes, devices=devices, goal=goal, environ=home)


def layout(first: FirstRecipe) -> dict[str, tuple[int, int]]:
    """Role -> instances, tensor parallelism."""
    return {name: (role.instances, role.parallel.tp) for name, role in first.loaded.recipe.roles()}


def loaded(text: str, folder: Path) -> LoadedRecipe:
    path = folder / "again.yaml"
    path.write_text(text)
    return load_recipe(path, environ={})


@each_row("nodes", [1, 2])
@each_row("goal", Goal)
@each_row("hardware", HARDWARE)
def test_every_recipe_plans_on_the_nodes_asked_for(hardware: str, goal: Goal, nodes: int, tmp_path: Path) -> None:
    first = made(model(tmp_path / "some", 30), hardware, goal, nodes)
    assert first.checked
    again = loaded(first.text, tmp_path)
    plan = plan_for(again, None, run_dir="R", run_id="R", versions=VERSIONS).plan
    if hardware in GPUS:
        assert len(plan.nodes) == nodes
        used = sum(len(process.devices) for process in plan.processes if process.role in ("prefill", "decode"))
        assert used == nodes * HARDWARE[hardware].devices
    assert ("lmcache-0" in {process.name for process in plan.processes}) == (goal is Goal.AGENTS)


@each_row("hardware, goal, nodes", [(name, goal, 1 + n % 2) for n, (name, goal) in enumerate(product(HARDWARE, Goal))])
def test_so_is_that_of_an_id_that_is_not_cached(hardware: str, goal: Goal, nodes: int, tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    first = first_recipe("org/model", hardware, nodes=nodes, devices=None, goal=goal, environ=home)
    assert not first.checked
    assert "id: org/model  # NOT CHECKED: not in the hub's cache here" in first.text
    assert "max-model-len" not in first.text
    loaded(first.text, tmp_path)


@each_row("gib, goal, nodes, expected", [
    (30, Goal.THROUGHPUT, 1, {"prefill": (4, 1), "decode": (4, 1)}),
    (30, Goal.LATENCY, 1, {"prefill": (1, 4), "decode": (1, 4)}),
    (30, Goal.LATENCY, 2, {"prefill": (1, 8), "decode": (1, 8)}),
    (100, Goal.THROUGHPUT, 1, {"prefill": (2, 2), "decode": (2, 2)}),
    (400, Goal.THROUGHPUT, 1, {"aggregated": (1, 8)}),
    (400, Goal.THROUGHPUT, 2, {"prefill": (1, 8), "decode": (1, 8)}),
    (400, Goal.THROUGHPUT, 3, {"prefill": (1, 8), "decode": (2, 8)}),
    (400, Goal.AGENTS, 3, {"prefill": (2, 8), "decode": (1, 8)}),
])  # fmt: skip
def test_instances_follow_the_weights_and_the_goal(
    gib: int, goal: Goal, nodes: int, expected: dict[str, tuple[int, int]], tmp_path: Path
) -> None:
    assert layout(made(model(tmp_path / "some", gib), "h100", goal, nodes)) == expected


def test_the_planners_numbers_are_in_the_comments(tmp_path: Path) -> None:
    text = made(model(tmp_path / "some", 100), "h100").text
    assert "parallel:  # weights of a rank 50 of 79 GiB; " in text
    assert "requests of 32768 tokens" in text
    assert "max-model-len: 32768  # the model's 40960, at most 32768 for --goal throughput" in text


QWEN3_06B = {"num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16, "head_dim": 128}
LLAMA_32_1B = {"num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 32, "head_dim": 64}


@each_row("config, length", [(QWEN3_06B, 8192), ({**LLAMA_32_1B, "max_position_embeddings": 131072}, 16384)])
@each_row("goal", Goal)
def test_a_length_is_halved_on_a_cpu(config: dict[str, Any], length: int, goal: Goal, tmp_path: Path) -> None:
    """At 32768 tokens the second would need every block of its GiB, and vLLM keeps one for itself."""
    first = made(model(tmp_path / "small", 1, **config), "cpu", goal)
    assert first.checked
    assert first.crossings == ()
    assert first.loaded.recipe.engine.args["max-model-len"] == length
    assert f"halved to {length} until it fits" in first.text


def test_a_model_whose_requests_are_too_large_for_a_cpu_is_refused_with_the_numbers(tmp_path: Path) -> None:
    model(tmp_path / "wide", 1, num_hidden_layers=64, num_key_value_heads=64)
    done = typed(tmp_path, "--model", "wide", "--hardware", "cpu")
    assert done.code == 2
    assert "a request of 8192 tokens takes 16.0 GiB of KV, and an engine on a CPU has 1 GiB for it" in done.err
    assert "VLLM_CPU_KVCACHE_SPACE" in done.err


@each_row("goal, length", [(Goal.THROUGHPUT, 32768), (Goal.AGENTS, 131072)])
@each_row("hardware", ["h100", "cpu"])
def test_a_model_without_a_length_gets_the_goals(hardware: str, goal: Goal, length: int, tmp_path: Path) -> None:
    first = made(model(tmp_path / "some", 1, num_hidden_layers=1, max_position_embeddings=None), hardware, goal)
    assert first.loaded.recipe.engine.args["max-model-len"] == length
    assert f"max-model-len: {length}  # NOT CHECKED: config.json has no max_position_embeddings" in first.text


@each_row(
    "gib, hardware, nodes, most",
    [(30, "h100", 1, 4), (30, "h100", 2, 8), (200, "h100", 2, 2), (400, "h100", 3, 1), (30, "cpu", 2, 1)],
)
def test_l1_is_sized_for_most_prefills(gib: int, hardware: str, nodes: int, most: int, tmp_path: Path) -> None:
    first = made(model(tmp_path / "some", gib), hardware, Goal.AGENTS, nodes)
    plan = plan_for(first.loaded, None, run_dir="R", run_id="R", versions=VERSIONS).plan
    assert max(len(server.engines) for server in plan.lmcache) == most
    (line,) = [line for line in first.text.splitlines() if "l1_size_gb" in line]
    assert f" {most} engine(s)" in line


def test_a_model_that_does_not_fit_is_refused_with_the_numbers(tmp_path: Path) -> None:
    model(tmp_path / "huge", 700)
    done = typed(tmp_path, "--model", "huge", "--hardware", "h100", "--nodes", "2", "--out", "new.yaml")
    assert done.code == 2
    assert "at TP 8 a rank holds 87.5 GiB of weights" in done.err
    assert "h100 has 79 GiB a device" in done.err
    assert not (tmp_path / "new.yaml").exists()


def test_a_cached_id_is_read(tmp_path: Path) -> None:
    cache = tmp_path / ".cache" / "huggingface" / "hub" / "models--org--model"
    commit = "0123456789abcdef0123456789abcdef01234567"
    model(cache / "snapshots" / commit, 100)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(commit)
    home = {"HOME": str(tmp_path)}
    first = first_recipe("org/model", "h100", nodes=1, devices=None, goal=Goal.THROUGHPUT, environ=home)
    assert layout(first) == {"prefill": (2, 2), "decode": (2, 2)}
    assert "read from the hub's cache" in first.text


def test_a_written_recipe_is_what_up_takes(tmp_path: Path) -> None:
    model(tmp_path / "tiny", 1, num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    written = typed(tmp_path, "--model", "tiny", "--hardware", "cpu", "-o", "new.yaml")
    assert written.code == 0
    assert written.out == ""
    assert "new.yaml is written; next: pdserve plan new.yaml, pdserve preflight new.yaml" in written.err
    again = typed(tmp_path, "--model", "org/model", "--hardware", "cpu", "-o", "new.yaml")
    assert (again.code, "nothing is overwritten" in again.err) == (2, True)
    done = run(("up", "new.yaml", "--dry-run"), tmp_path, {})
    assert done.code == 0
    assert "prefill-0" in done.out
    assert "decode-0" in done.out


@each_row("words, said", [
    (("--hardware", "h100"), "Missing option '--model'"),
    (("--model", "org/model", "--hardware", "tpu"), "the hardware tpu is not known"),
    (("--model", "no-such", "--hardware", "cpu"), "no such folder, and no id of the hub"),
    (("--model", "org/model", "--hardware", "cpu", "--gpus-per-node", "2"), "cpu has no GPUs"),
    (("--model", "org/model", "--hardware", "h100", "--nodes", "0"), "--nodes"),
    (("--model", "org/model", "--hardware", "cpu", "-o", "no/such/new.yaml"), "cannot be written"),
])  # fmt: skip
def test_a_wrong_command_line_ends_with_2(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = typed(tmp_path, *words)
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err


GIB = 1 << 30
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 8192,
    "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 40960, "torch_dtype": "bfloat16",
}  # fmt: skip


def model(folder: Path, gib: int, **changes: Any) -> Path:
    """A model of `gib` GiB that tensor parallelism can cut."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    safetensors(folder / "model.safetensors", {"model.layers.0.mlp.down_proj.weight": tensor(gib, GIB // 2)})
    return folder
