"""Downloads and commands of a setup beyond the golden plans: on which nodes, when, and what is not fetched."""

from __future__ import annotations

from typing import Any

from pdserve.plan.bash import render_shell
from pdserve.plan.process import Process
from tests.plan.kit import hosts, on_gpus, plan, recipe
from tests.tables import each_row

BY_ID: dict[str, Any] = {"model": {"path": None, "id": "org/model"}}


def fetchers(*changes: dict[str, Any], sizes: tuple[int, ...] = (1, 1)) -> list[Process]:
    made = plan(recipe(on_gpus(), BY_ID, *changes), *hosts(*sizes))
    return [process for process in made.processes if process.role == "weights"]


def test_a_node_without_an_engine_prepares_nothing() -> None:
    made = plan(recipe(on_gpus(), BY_ID, {"setup": ["x"]}), *hosts(2, 0))
    assert {process.node for process in made.processes if process.fetches_weights or process.is_setup} == {"host0"}


def test_roles_with_caches_of_their_own_fetch_for_themselves() -> None:
    own = {"decode": {"env": {"HF_HOME": "/scratch"}}, "engine": {"args": {"load-format": "dummy"}}}
    assert all(fetcher.argv[5:7] == ("--load-format", "dummy") for fetcher in fetchers(own))
    assert [(fetcher.node, fetcher.env.set.get("HF_HOME")) for fetcher in fetchers(own, sizes=(2,))] == [
        ("host0", None),
        ("host0", "/scratch"),
    ]


@each_row(
    "change",
    [
        {"model": {"download": False}},
        {"model": {"id": None, "path": "models/tiny"}},
        {"model": {"id": "s3://bucket/model"}},
        {"model": {"id": "org/model:Q4_K_M"}},
        {"engine": {"env": {"VLLM_USE_MODELSCOPE": "True"}}},
    ],
)
def test_what_is_switched_off_or_not_on_the_hub_is_not_fetched(change: dict[str, Any]) -> None:
    assert fetchers(change) == []


def test_by_hand_each_command_is_done_before_the_next_stage() -> None:
    lines = render_shell(plan(recipe(on_gpus(), BY_ID, {"setup": ["echo 'a b'", "c"]}), *hosts(2))).splitlines()
    assert "  exec echo 'a b'" in lines
    for name, then in (("setup-0", "    finish setup-1 logs/setup-1@host0.log"), ("weights-0", "")):
        at = lines.index(f"    finish {name} logs/{name}@host0.log")
        assert lines[at + 1] == "    await_all"
        assert lines[at + 2].startswith(then)


def drafting(**config: Any) -> dict[str, Any]:
    return {"decode": {"args": {"speculative-config": {"method": "eagle3", "num_speculative_tokens": 3, **config}}}}


def models(*changes: dict[str, Any], sizes: tuple[int, ...] = (1, 1)) -> list[tuple[str, str | None]]:
    """Node and model of each download."""
    return [(process.node, value(process.argv, "--model")) for process in fetchers(*changes, sizes=sizes)]


def value(argv: tuple[str, ...], flag: str) -> str | None:
    return argv[argv.index(flag) + 1] if flag in argv else None


@each_row("args", [{"spec-model": "org/draft"}, {"speculative-config.model": "org/draft"}])
def test_the_other_flags_that_name_it_are_read(args: dict[str, Any]) -> None:
    assert models({"decode": {"args": args}})[-1] == ("host1", "org/draft")


@each_row(
    "change",
    [
        drafting(method="mtp"),
        drafting(method="ngram", model="ngram"),
        drafting(model="/models/draft"),
        {"decode": {"args": {"speculative-config": None}}, "engine": drafting(model="org/draft")["decode"]},
    ],
)
def test_drafts_without_a_model_of_the_hub_fetch_nothing_more(change: dict[str, Any]) -> None:
    assert {model for node, model in models(change) if node == "host1"} == {"org/model"}


def test_a_model_that_writes_its_own_drafts_is_fetched_once() -> None:
    assert models(drafting(model="org/model"), sizes=(2,)) == [("host0", "org/model")]
