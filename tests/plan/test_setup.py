"""The commands of a recipe's setup: on which nodes, when, and with what."""

from __future__ import annotations

import json
from typing import Any

from pdserve.plan.bash import render_shell
from pdserve.plan.process import ExitProbe, Process
from tests.plan.kit import hosts, on_gpus, plan, recipe, with_lmcache

BY_ID: dict[str, Any] = {"model": {"path": None, "id": "org/model"}}


def commands(*changes: dict[str, Any], sizes: tuple[int, ...] = (1, 1)) -> list[Process]:
    made = plan(recipe(on_gpus(), *changes), *hosts(*sizes))
    return [process for process in made.processes if process.is_setup]


def test_each_node_with_an_engine_runs_each_command_in_order_before_all_others() -> None:
    made = plan(recipe(on_gpus(), with_lmcache(), BY_ID, {"setup": ["first", "second"]}), *hosts(1, 1))
    setup = [process for process in made.processes if process.is_setup]
    assert [(process.name, process.node, process.start_stage) for process in setup] == [
        ("setup-0", "host0", -3),
        ("setup-0-node1", "host1", -3),
        ("setup-1", "host0", -2),
        ("setup-1-node1", "host1", -2),
    ]
    assert min(process.start_stage for process in made.processes if not process.is_setup) == -1
    assert all(isinstance(process.probe, ExitProbe) for process in setup)
    assert [process.node for process in commands({"setup": ["x"]}, sizes=(2, 0))] == ["host0"]


def test_text_is_split_into_words_and_no_shell_reads_it() -> None:
    first, second = commands({"setup": ["echo 'a b' && c", ["bash", "-c", "a && b"]]}, sizes=(2,))
    assert first.argv == ("echo", "a b", "&&", "c")
    assert second.argv == ("bash", "-c", "a && b")


def test_it_has_the_shared_environment_and_secrets_by_name_only() -> None:
    shared = {"engine": {"env": {"HF_HOME": "/hf", "TOKEN": {"secret": "MINE"}}}, "decode": {"env": {"X": 1}}}
    (process,) = commands({"setup": ["x"]}, shared, sizes=(2,))
    assert process.env.set["HF_HOME"] == "/hf"
    assert "X" not in process.env.set
    assert process.env.secrets == {"TOKEN": "MINE"}, "and no key of the engines"


def test_its_limit_is_the_recipes() -> None:
    (process,) = commands({"setup": ["x"], "timeouts": {"setup_seconds": 7}}, sizes=(2,))
    assert process.ready_seconds == 7


def test_by_hand_each_command_is_done_before_the_next_stage() -> None:
    lines = render_shell(plan(recipe(on_gpus(), {"setup": ["echo 'a b'", "c"]}), *hosts(2))).splitlines()
    assert "  exec echo 'a b'" in lines
    at = lines.index("    finish setup-0 logs/setup-0@host0.log")
    assert lines[at + 1 : at + 3] == ["    await_all", "    finish setup-1 logs/setup-1@host0.log"]


def test_it_is_in_the_plan_as_json() -> None:
    made = plan(recipe(on_gpus(), {"setup": ["x"]}), *hosts(2))
    assert json.loads(made.model_dump_json())["processes"][0]["role"] == "setup"


def test_a_recipe_without_a_setup_has_the_plan_that_it_had() -> None:
    assert commands() == []
