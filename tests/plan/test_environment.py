"""The environment of each process beyond the golden plans, its secrets, and its part of the CPUs of a node."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.errors import RecipeError
from pdserve.node.supervised import environment
from pdserve.plan.model import cpu_share
from pdserve.plan.process import Env
from tests.plan.kit import plan, recipe, with_lmcache
from tests.plan.shapes import SHAPES, shape
from tests.tables import each_row


@each_row("name", SHAPES)
def test_nothing_is_set_and_unset_or_secret_and_set(name: str) -> None:
    for process in shape(name).processes:
        assert not process.env.set.keys() & {*process.env.unset, *process.env.secrets}, process.name


def test_a_name_of_an_allow_list_with_a_star_stands_for_all_that_begin_so() -> None:
    rule = Env(base="allow", allow=("PATH", "HSA_*"), set={"HSA_A": "ours"})
    inherited = {"PATH": "/bin", "HSA_A": "1", "HSA_B": "2", "HSA": "3", "XHSA_B": "4", "PATHS": "5"}
    assert environment(rule, inherited, {}) == {"PATH": "/bin", "HSA_A": "ours", "HSA_B": "2"}


def test_what_the_plan_decides_wins_over_the_recipe() -> None:
    built = plan(recipe({"engine": {"env": {"VLLM_HOST_IP": "203.0.113.9", "PYTHONHASHSEED": 99}}}))
    assert built.process("prefill-0").env.set["VLLM_HOST_IP"] == "127.0.0.1"
    assert built.process("prefill-0").env.set["PYTHONHASHSEED"] == "0"


@each_row(
    "chosen, excluded",
    [
        ({}, "127.0.0.1,localhost,::1"),
        ({"no_proxy": "hub.example, 10.0.0.0/8"}, "hub.example,10.0.0.0/8,127.0.0.1,localhost,::1"),
        ({"NO_PROXY": "a.example", "no_proxy": "b.example"}, "a.example,b.example,127.0.0.1,localhost,::1"),
        ({"NO_PROXY": "::1"}, "::1,127.0.0.1,localhost"),
        ({"NO_PROXY": ""}, "127.0.0.1,localhost,::1"),
        ({"NO_PROXY": "*"}, "*"),
    ],
)
def test_engines_reach_each_other_past_the_proxy_of_the_site(chosen: dict[str, str], excluded: str) -> None:
    env = plan(recipe({"engine": {"env": chosen}})).process("decode-0").env
    assert (env.set["NO_PROXY"], env.set["no_proxy"]) == (excluded, excluded)
    assert not [name for name in env.unset if name.lower().endswith("_proxy")], "downloads go through it"


def test_a_secret_list_of_exclusions_is_the_operators() -> None:
    env = plan(recipe({"engine": {"env": {"NO_PROXY": {"secret": "SITE"}}}})).process("decode-0").env
    assert "NO_PROXY" not in env.set
    assert env.set["no_proxy"] == "127.0.0.1,localhost,::1"


def test_a_plugin_allow_list_of_the_recipe_lets_ours_in() -> None:
    def plugins(text: str) -> str:
        return plan(recipe({"engine": {"env": {"VLLM_PLUGINS": text}}})).process("prefill-0").env.set["VLLM_PLUGINS"]

    assert plugins("other") == "other,pdserve"
    assert plugins("pdserve,other") == "pdserve,other"
    assert plugins("") == "pdserve"


def test_lmcache_and_the_proxy_get_an_allow_list_without_credentials() -> None:
    built = shape("one-cpu")
    for name in ("lmcache-0", "proxy"):
        env = built.process(name).env
        assert env.base == "allow"
        assert {"PATH", "HOME", "LD_LIBRARY_PATH"} <= set(env.allow)
        assert not [v for v in env.allow if any(word in v for word in ("TOKEN", "KEY", "SECRET", "PROXY", "proxy"))]
    assert built.process("lmcache-0").env.secrets == {}


def test_a_secret_for_lmcache_is_refused_because_it_prints_its_environment() -> None:
    with pytest.raises(RecipeError, match="/env endpoint prints"):
        plan(recipe(with_lmcache(env={"TOKEN": {"secret": "TOKEN"}})))


TWO_AND_TWO: dict[str, Any] = {"prefill": {"instances": 2}, "decode": {"instances": 2}}
BINDING = "VLLM_CPU_OMP_THREADS_BIND"


def test_each_engine_has_its_part_and_all_else_all_of_them() -> None:
    built = plan(recipe(with_lmcache(), TWO_AND_TWO))
    parts = {process.name: cpu_share(built, process.name) for process in built.processes}
    assert [parts.pop(name) for name in ("prefill-0", "prefill-1", "decode-0", "decode-1")] == [
        (0, 4),
        (1, 4),
        (2, 4),
        (3, 4),
    ]
    assert parts
    assert set(parts.values()) == {None}


@each_row("binding, multiprocessing, prefill, decode", [
    ("nobind", 1, True, True), ("auto", 1, True, True), ("0-3", 1, False, False), ("0-3", 0, True, True),
])  # fmt: skip
def test_cpus_that_the_recipe_names_are_not_divided_unless_the_worker_is_in_its_engine_core(
    binding: str, multiprocessing: int, prefill: bool, decode: bool
) -> None:
    env = {BINDING: binding, "VLLM_ENABLE_V1_MULTIPROCESSING": multiprocessing}
    built = plan(recipe({"prefill": {"env": env}}))
    assert [cpu_share(built, name) is not None for name in ("prefill-0", "decode-0")] == [prefill, decode]
