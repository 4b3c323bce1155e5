"""The environment of each process beyond the golden plans, its secrets, and its part of the CPUs of a node."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.errors import RecipeError
from pdserve.node.supervised import environment
from pdserve.plan.model import cpu_share
from pdserve.plan.process import Env
from tests.plan.kit import hosts, on_gpus, plan, recipe, with_lmcache
from tests.plan.shapes import SHAPES, shape
from tests.tables import each_row


@each_row("name", SHAPES)
def test_nothing_is_set_and_unset_or_secret_and_set(name: str) -> None:
    for process in shape(name).processes:
        assert not process.env.set.keys() & {*process.env.unset, *process.env.secrets}, process.name


def test_lmcache_on_rocm_runs_in_the_modes_that_the_image_gives_its_engines() -> None:
    """Both open handles of one runtime: vLLM's ROCm image sets HSA_ENABLE_IPC_MODE_LEGACY=1."""
    built = plan(recipe(on_gpus(platform="rocm"), with_lmcache()), *hosts(2))
    image = {"HSA_ENABLE_IPC_MODE_LEGACY": "1", "HSA_XNACK": "0"}
    for name in ("lmcache-0", "prefill-0"):
        assert environment(built.process(name).env, image, {}).items() >= image.items()
    other = plan(recipe(on_gpus(), with_lmcache()), *hosts(2)).process("lmcache-0").env
    assert not environment(other, image, {}).keys() & image.keys()


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


def test_an_engine_that_is_alone_on_its_node_has_all() -> None:
    built = plan(recipe(), *hosts(0, 0))
    assert built.process("prefill-0").node != built.process("decode-0").node
    assert cpu_share(built, "prefill-0") is None


def test_on_devices_cpus_are_not_divided() -> None:
    assert cpu_share(plan(recipe(on_gpus()), *hosts(2)), "prefill-0") is None


@pytest.mark.parametrize(("binding", "divided"), [("nobind", True), ("auto", True), ("0-3", False)])
def test_cpus_that_the_recipe_names_are_not_divided(binding: str, divided: bool) -> None:
    built = plan(recipe({"prefill": {"env": {BINDING: binding}}}))
    assert (cpu_share(built, "prefill-0") is not None) is divided
    assert (cpu_share(built, "decode-0") is not None) is divided


def test_a_worker_in_its_engine_core_is_bound_by_nobody_else() -> None:
    env = {BINDING: "0-3", "VLLM_ENABLE_V1_MULTIPROCESSING": 0}
    assert cpu_share(plan(recipe({"prefill": {"env": env}})), "prefill-0") == (0, 2)
    two_workers = recipe({"prefill": {"env": env, "parallel": {"tp": 2}}})
    assert cpu_share(plan(two_workers), "prefill-0") is None
