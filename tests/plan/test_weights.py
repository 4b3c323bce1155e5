"""Which nodes fetch the model, with what, and when."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.plan.model import ExitProbe, Process
from pdserve.plan.render.bash import render_shell
from tests.plan.kit import hosts, on_gpus, plan, recipe, with_lmcache

BY_ID: dict[str, Any] = {"model": {"path": None, "id": "org/model"}}


def fetchers(*changes: dict[str, Any], sizes: tuple[int, ...] = (1, 1)) -> list[Process]:
    made = plan(recipe(on_gpus(), BY_ID, *changes), *hosts(*sizes))
    return [process for process in made.processes if process.role == "weights"]


def test_each_node_that_hosts_an_engine_fetches_once_and_before_all_others() -> None:
    made = plan(recipe(on_gpus(), with_lmcache(), BY_ID), *hosts(1, 1))
    fetches = [process for process in made.processes if process.role == "weights"]
    assert [(process.name, process.node) for process in fetches] == [("weights-0", "host0"), ("weights-1", "host1")]
    assert all(isinstance(process.probe, ExitProbe) for process in fetches)
    assert max(process.start_stage for process in fetches) < min(
        process.start_stage for process in made.processes if process.role != "weights"
    )
    assert [process.node for process in fetchers(sizes=(2, 0))] == ["host0"]


def test_the_engines_interpreter_runs_it_on_the_recipes_revision() -> None:
    (fetcher, _) = fetchers({"engine": {"python": "/opt/vllm/python"}, "model": {"revision": "abc"}})
    assert fetcher.argv == (
        *("/opt/vllm/python", "-m", "pdserve.weights", "--model", "org/model", "--revision", "abc"),
        *("--record", "/run/pdserve/test/weights/weights-0.json"),
    )


def test_it_looks_where_the_engines_look_and_fetches_what_they_load() -> None:
    (fetcher, _) = fetchers({"engine": {"args": {"download-dir": "/models", "load-format": "dummy"}}})
    assert fetcher.argv[5:9] == ("--cache-dir", "/models", "--load-format", "dummy")


def test_roles_with_caches_of_their_own_fetch_for_themselves() -> None:
    own = {"decode": {"env": {"HF_HOME": "/scratch"}}}
    assert [(fetcher.node, fetcher.env.set.get("HF_HOME")) for fetcher in fetchers(own, sizes=(2,))] == [
        ("host0", None),
        ("host0", "/scratch"),
    ]


def test_it_has_the_token_by_name_only() -> None:
    (fetcher, _) = fetchers({"engine": {"env": {"HF_TOKEN": {"secret": "MY_TOKEN"}}}})
    assert fetcher.env.secrets == {"HF_TOKEN": "MY_TOKEN"}, "and no key of the engines"
    assert "TOKEN" not in " ".join(fetcher.argv)


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"download": False}},
        {"model": {"id": None, "path": "models/tiny"}},
        {"model": {"id": "s3://bucket/model"}},
        {"model": {"id": "org/model:Q4_K_M"}},
        {"engine": {"env": {"VLLM_USE_MODELSCOPE": "True"}}},
    ],
    ids=["switched off", "a folder", "not on the hub", "one file of many", "ModelScope"],
)
def test_what_is_not_fetched(change: dict[str, Any]) -> None:
    assert fetchers(change) == []


def test_by_hand_the_next_stage_waits_for_its_end() -> None:
    lines = render_shell(plan(recipe(on_gpus(), BY_ID), *hosts(2))).splitlines()
    at = lines.index("    finish weights-0 logs/weights-0@host0.log")
    assert lines[at + 1 : at + 2] == ["    await_all"]
