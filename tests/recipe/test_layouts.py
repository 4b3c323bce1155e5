"""Pipeline stages and block sizes between which a connector does not move KV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdserve.recipe.load.problems import Problem
from pdserve.recipe.rules import layout
from tests.plan.kit import MOONCAKE, NIXL, aggregated, on_gpus, recipe
from tests.tables import each_row

Sides = dict[str, Any]


def sides(connector: dict[str, Any], prefill: Sides, decode: Sides) -> Sequence[Sides]:
    return on_gpus(4, 4), {"prefill": {"connector": connector, **prefill}, "decode": {"connector": connector, **decode}}


def blocks(size: int) -> Sides:
    return {"args": {"block-size": size}}


def described(problems: Sequence[Problem]) -> list[tuple[str, str | None]]:
    return [(".".join(map(str, problem.path)), problem.what) for problem in problems]


@each_row("role, ends", [("prefill", "each transfer would fail"), ("decode", "at its start")])
def test_nixl_refuses_stages_on_either_side(role: str, ends: str) -> None:
    staged = recipe(*sides(NIXL, {}, {}), {role: {"parallel": {"tp": 2, "pp": 2}}})
    (problem,) = layout.pipeline_parallel(staged)
    assert problem.path == (role, "parallel", "pp")
    assert problem.what.endswith(ends)
    assert problem.todo is not None
    assert problem.todo.startswith("write pp: 1 (with tp: 4")


def test_mooncake_and_an_engine_alone_take_stages() -> None:
    stages = {"parallel": {"tp": 2, "pp": 2}}
    assert not list(layout.pipeline_parallel(recipe(*sides(MOONCAKE, stages, {}))))
    assert not list(layout.pipeline_parallel(recipe(aggregated(**stages), {"platform": "cuda"})))


@each_row("prefill, decode, shown", [
    (blocks(64), blocks(128), "decode has blocks of 128 tokens, prefill of 64 tokens"),
    (blocks(128), {}, "decode has blocks of vLLM's default size, prefill of 128 tokens"),
    ({}, blocks(128), "decode has blocks of 128 tokens, prefill of vLLM's default size"),
])  # fmt: skip
def test_mooncake_refuses_unequal_blocks(prefill: Sides, decode: Sides, shown: str) -> None:
    (problem,) = layout.block_sizes(recipe(*sides(MOONCAKE, prefill, decode)))
    assert problem.what.startswith(shown)
    assert problem.todo == "set engine.args.block-size for both"
    assert not list(layout.uneven_blocks(recipe(*sides(MOONCAKE, prefill, decode))))


@each_row("prefill, decode, tp, why", [
    (128, 64, 4, "no multiple of prefill's"),
    (48, 128, 4, "no multiple of prefill's"),
    (64, 128, 2, "only KV that every rank has whole (MLA)"),
])  # fmt: skip
def test_nixl_is_warned_of_blocks_that_vllm_may_not_divide(prefill: int, decode: int, tp: int, why: str) -> None:
    made = recipe(*sides(NIXL, blocks(prefill), blocks(decode)), {"decode": {"parallel": {"tp": tp}}})
    ((path, what),) = described(list(layout.uneven_blocks(made)))
    assert path == "decode.args.block-size"
    assert what is not None
    assert why in what
    assert not list(layout.block_sizes(made)), "it may work"


def test_nixl_takes_multiples() -> None:
    assert not list(layout.uneven_blocks(recipe(*sides(NIXL, blocks(64), blocks(128)))))
