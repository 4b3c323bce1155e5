"""Data-parallel load balancing beyond the golden plans: where ranks go, and which layouts cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.errors import PreflightError, RecipeError
from pdserve.plan import model_rules
from pdserve.plan.process import Process
from pdserve.recipe.rules import problems
from tests.plan.kit import NIXL, hosts, on_gpus, plan, recipe, with_lmcache
from tests.tables import each_row

HYBRID, EXTERNAL = "hybrid", "external"


def wide(mode: str, **parallel: Any) -> dict[str, Any]:
    """A prefill of four ranks over two nodes."""
    return {"prefill": {"parallel": {"dp": 4, "nodes": 2, "ep": True, "load_balancing": mode, **parallel}}}


def prefills(mode: str, *changes: dict[str, Any], sizes: tuple[int, ...] = (2, 2, 1), **parallel: Any) -> list[Process]:
    made = plan(recipe(on_gpus(), wide(mode, **parallel), *changes), *hosts(*sizes))
    return [process for process in made.processes if process.role == "prefill"]


def test_a_rank_of_several_workers_stays_on_its_node() -> None:
    assert [(p.node, p.devices) for p in prefills(EXTERNAL, sizes=(4, 4, 1), tp=2)] == [
        ("host0", (0, 1)),
        ("host0", (2, 3)),
        ("host1", (0, 1)),
        ("host1", (2, 3)),
    ]


def test_on_a_cpu_too_few_nodes_are_counted_not_their_devices() -> None:
    with pytest.raises(PreflightError) as caught:
        plan(recipe(wide(EXTERNAL)), *hosts(0))
    assert str(caught.value) == "prefill-0 spans 2 nodes, and there is 1 here"
    assert "sbatch --nodes=2 --gres=none" in str(caught.value.todo)


@each_row(
    "change, what, todo",
    [
        ({"prefill": {"parallel": {"load_balancing": HYBRID}}}, "hybrid load balancing divides", "raise dp"),
        (wide(EXTERNAL, dp=3), "3 ranks over 2 nodes: with external load balancing", "multiple of nodes"),
        (wide(HYBRID, nodes=1), "on one node hybrid is internal", "internal"),
        (wide(HYBRID, dp=2), "each node has one rank", "external"),
        ({**with_lmcache(), **wide(EXTERNAL)}, "prefill attaches to LMCache", "take prefill out of lmcache.on"),
        ({"prefill": {"parallel": {"pcp": 2}}}, "Mooncake's bootstrap server knows no context-parallel", "nixl"),
        ({"decode": {"connector": NIXL, "parallel": {"pcp": 2}}}, "NIXL takes context parallelism in pref", "remove"),
        ({"platform": "cpu", "prefill": {"parallel": {"pcp": 2}}}, "attention on a CPU has no context", "remove"),
        (
            {**wide(EXTERNAL, nodes=1), "proxy": {"routing": {"prefill": {"kind": "kv_events"}}}},
            "publish in processes of their own",
            "prefix_aware",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_write(change: dict[str, Any], what: str, todo: str) -> None:
    (refused,) = [problem for problem in problems(recipe(on_gpus(), change)) if what in problem.what]
    assert todo in f"{refused.todo} {refused.write}"


def test_a_model_without_experts_has_no_external_ranks() -> None:
    wanted = recipe(on_gpus(), wide(EXTERNAL))
    with pytest.raises(RecipeError, match="this model has no experts") as caught:
        model_rules.check_experts(wanted, {"model_type": "llama"})
    assert caught.value.todo == "write `instances: 4` with dp 1: that is the same"
    for config in ({"num_local_experts": 8}, {"text_config": {"n_routed_experts": 256}}, None):
        model_rules.check_experts(wanted, config)
    model_rules.check_experts(recipe(on_gpus(), wide(HYBRID)), {"model_type": "llama"})
