"""On a CPU platform the engines of a node divide its CPUs."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.plan.model import cpu_share
from tests.plan.kit import hosts, on_gpus, plan, recipe, with_lmcache

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
