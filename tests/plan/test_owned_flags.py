"""A flag that pdserve sets is refused in recipes, and appears once: rules and command lines are made from one table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from pdserve.plan.model import Plan
from pdserve.plan.process import Process
from pdserve.recipe.flags import ENGINE_FLAGS, SERVER_FLAGS, OwnedFlag
from pdserve.recipe.rules import problems
from tests.plan.kit import MULTI, NIXL, aggregated, hosts, on_gpus, plan, recipe, with_lmcache

SPANNING = {"prefill": {"parallel": {"tp": 4, "pp": 2, "dp": 2, "nodes": 2, "ep": True}}}
RECIPES = {
    "cpu with LMCache": (recipe(with_lmcache(shm_name="pool", l2=[{"type": "fs"}, {"type": "resp"}])), ()),
    "aggregated": (recipe(aggregated()), ()),
    "NIXL": (recipe({"prefill": {"connector": NIXL}, "decode": {"connector": NIXL}}), ()),
    "over nodes": (recipe(on_gpus(), SPANNING, {"model": {"id": "a/b", "path": None, "revision": "c"}}), hosts(16, 16)),
    "KV events": (recipe({"proxy": {"routing": {"decode": {"kind": "kv_events"}}}}), ()),
    "LMCache on GPUs": (recipe(on_gpus(), with_lmcache(transfer_mode="lmcache_driven")), hosts(8)),
}
UNOWNED = {"--enable-prompt-tokens-details", "--disable-uvicorn-access-log", "--enable-prefix-caching"}
"""Defaults, which a recipe may override."""


def named(process: Process) -> list[str]:
    """The flags of a command line, in its order."""
    return [word for word in process.argv if word.startswith("--")]


@pytest.fixture(scope="module", params=RECIPES)
def built(request: pytest.FixtureRequest) -> Plan:
    wanted, nodes = RECIPES[request.param]
    return plan(wanted, *nodes)


def tables(plan: Plan) -> Iterator[tuple[Process, dict[str, OwnedFlag]]]:  # type: ignore[type-arg]
    for process in plan.processes:
        if process.is_engine:
            yield process, ENGINE_FLAGS
        elif process.is_lmcache:
            yield process, SERVER_FLAGS


def test_every_flag_on_a_command_line_is_in_the_table(built: Plan) -> None:
    for process, table in tables(built):
        for flag in set(named(process)) - UNOWNED:
            assert flag.removeprefix("--").removeprefix("no-") in table, f"{process.name}: {flag}"


def test_no_flag_is_given_twice(built: Plan) -> None:
    for process, _ in tables(built):
        twice = {flag for flag, count in Counter(named(process)).items() if count > 1}
        assert twice <= {"--l2-adapter"}, process.name


def test_a_new_row_is_rendered_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag of the table needs no second entry anywhere."""
    monkeypatch.setitem(ENGINE_FLAGS, "enforce-eager", OwnedFlag("set engine.eager", lambda line: True))
    monkeypatch.setitem(SERVER_FLAGS, "hash-algorithm", OwnedFlag("set lmcache.hash", lambda line: "blake3"))
    theirs = recipe(
        with_lmcache(extra_args={"hash-algorithm": "vllm"}), {"prefill": {"args": {"enforce-eager": False}}}
    )
    built = plan(theirs)
    assert [word for word in built.process("prefill-0").argv if "enforce-eager" in word] == ["--enforce-eager"]
    server = built.process("lmcache-0").argv
    assert server.count("--hash-algorithm") == 1
    assert server[server.index("--hash-algorithm") + 1] == "blake3"
    refused = {problem.path: problem.todo for problem in problems(theirs)}
    assert refused[("prefill", "args", "enforce-eager")] == "set engine.eager"
    assert refused[("lmcache", "extra_args", "hash-algorithm")] == "set lmcache.hash"


def test_a_flag_that_is_ours_in_some_recipes_is_refused_in_those_alone() -> None:
    flag = {"engine": {"args": {"distributed-executor-backend": "ray"}}}
    path = ("engine", "args", "distributed-executor-backend")
    assert path not in {problem.path for problem in problems(recipe(on_gpus(8, 8), flag))}
    assert path in {problem.path for problem in problems(recipe(on_gpus(8, 8), SPANNING, flag))}
    lazy = with_lmcache(extra_args={"l1-use-lazy": False})
    path = ("lmcache", "extra_args", "l1-use-lazy")
    assert path in {problem.path for problem in problems(recipe(lazy))}
    assert path not in {problem.path for problem in problems(recipe(on_gpus(), lazy))}


def test_variables_of_connectors_are_refused() -> None:
    built = plan(recipe({"prefill": {"connector": MULTI}, **with_lmcache()}))
    decided = {"MC_MIN_RPC_PORT", "MC_MAX_RPC_PORT", "VLLM_MOONCAKE_BOOTSTRAP_PORT"}
    assert decided <= built.process("prefill-0").env.set.keys()
    wanted = recipe({"engine": {"env": dict.fromkeys(decided, 1)}})
    assert {("engine", "env", name) for name in decided} <= {problem.path for problem in problems(wanted)}
