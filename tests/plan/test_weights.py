"""Which nodes fetch the model, with what, and when."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.plan.bash import render_shell
from pdserve.plan.process import ExitProbe, Process
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


def drafting(**config: Any) -> dict[str, Any]:
    return {"decode": {"args": {"speculative-config": {"method": "eagle3", "num_speculative_tokens": 3, **config}}}}


def models(*changes: dict[str, Any], sizes: tuple[int, ...] = (1, 1)) -> list[tuple[str, str, str | None]]:
    """Node, model and revision of each download."""
    lines = [(process.node, process.argv) for process in fetchers(*changes, sizes=sizes)]
    return [(node, value(argv, "--model") or "", value(argv, "--revision")) for node, argv in lines]


def value(argv: tuple[str, ...], flag: str) -> str | None:
    return argv[argv.index(flag) + 1] if flag in argv else None


def test_the_draft_model_is_fetched_where_engines_load_it() -> None:
    assert models(drafting(model="org/draft", revision="v2")) == [
        ("host0", "org/model", None),
        ("host1", "org/model", None),
        ("host1", "org/draft", "v2"),
    ]


def test_a_draft_model_beside_a_local_model_is_fetched() -> None:
    local = {"model": {"id": None, "path": "models/tiny"}}
    assert models(local, drafting(model="org/draft")) == [("host1", "org/draft", None)]


@pytest.mark.parametrize(
    "args",
    [{"spec-model": "org/draft"}, {"speculative-config.model": "org/draft"}],
    ids=["the short flag", "a dotted flag"],
)
def test_the_other_flags_that_name_it_are_read(args: dict[str, Any]) -> None:
    assert models({"decode": {"args": args}})[-1] == ("host1", "org/draft", None)


@pytest.mark.parametrize(
    "change",
    [
        drafting(method="mtp"),
        drafting(method="ngram", model="ngram"),
        drafting(model="/models/draft"),
        {"decode": {"args": {"speculative-config": None}}, "engine": drafting(model="org/draft")["decode"]},
    ],
    ids=["the model's own layers", "no model", "a folder", "taken back for the role"],
)
def test_drafts_without_a_model_of_the_hub_fetch_nothing_more(change: dict[str, Any]) -> None:
    assert ("host1", "org/draft", None) not in models(change)
    assert {model for node, model, _ in models(change) if node == "host1"} == {"org/model"}


def test_a_model_that_writes_its_own_drafts_is_fetched_once() -> None:
    assert models(drafting(model="org/model"), sizes=(2,)) == [("host0", "org/model", None)]


def test_without_downloads_its_drafts_are_left_to_the_engines_too() -> None:
    assert models({"model": {"download": False}}, drafting(model="org/draft")) == []
