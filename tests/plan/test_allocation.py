"""What is asked of Slurm, and what is said of a job that is not that."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import PreflightError, RecipeError
from pdserve.plan.placement import place
from pdserve.plan.sbatch import JobShape, check_allocation, job_shape, usable_nodes
from tests.plan.kit import hosts, on_gpus, recipe

BIG: tuple[dict[str, Any], ...] = (on_gpus(8, 8, "rocm"), {"devices_per_node": 8, "name": "big"})
WORDS = ["recipes/big.yaml", "--set", "prefill.args.x=a b"]


def names(count: int) -> list[str]:
    return [f"n{i}" for i in range(count)]


@pytest.mark.parametrize(
    ("changes", "nodes", "gpus"),
    [
        (({},), 1, 0),
        (({"slurm": {"nodes": 2}},), 2, 0),
        ((on_gpus(8, 8), {"devices_per_node": 8}), 2, 8),
        ((on_gpus(4, 4), {"devices_per_node": 8}), 1, 8),
        ((on_gpus(4, 4), {"devices_per_node": 8, "slurm": {"nodes": 3}}), 3, 8),
        ((on_gpus(4, 4),), 1, 8),
        ((on_gpus(4, 4), {"slurm": {"nodes": 2}}), 2, 4),
        ((on_gpus(4, 2), {"prefill": {"instances": 2}, "slurm": {"nodes": 3}}), 3, 4),
        ((on_gpus(8, 8), {"prefill": {"parallel": {"nodes": 2}}, "slurm": {"nodes": 2}}), 2, 12),
    ],
)
def test_a_job_is_as_large_as_the_roles_need_or_as_the_recipe_sets(
    changes: tuple[dict[str, Any], ...], nodes: int, gpus: int
) -> None:
    assert job_shape(recipe(*changes)) == JobShape(nodes, gpus)


def test_too_few_nodes_in_the_recipe_are_the_recipes_fault() -> None:
    with pytest.raises(RecipeError) as caught:
        job_shape(recipe(*BIG, {"slurm": {"nodes": 1}}))
    assert caught.value.what == ("1 node of 8 devices cannot hold prefill 1 x 8 + decode 1 x 8 = 16 devices")
    assert (caught.value.where, caught.value.todo) == ("slurm.nodes", "write 2, or leave it out")


def test_an_instance_that_spans_more_nodes_than_there_are_has_no_size() -> None:
    spanning = {"prefill": {"parallel": {"nodes": 2}}, "slurm": {"nodes": 1}}
    with pytest.raises(RecipeError, match="however many devices they have"):
        job_shape(recipe(on_gpus(8, 8), spanning))


@pytest.mark.parametrize(
    ("count", "gpus", "here"),
    [
        (1, 8, "this job has 1 node with 8 GPUs each"),
        (2, 4, "this job has 2 nodes with 4 GPUs each"),
        (1, None, "this job has 1 node with 8 GPUs each"),
        (0, 8, "this job has 0 nodes with 8 GPUs each"),
    ],
)
def test_a_job_of_the_wrong_shape_is_an_error_with_the_line_to_type(count: int, gpus: int | None, here: str) -> None:
    with pytest.raises(PreflightError) as caught:
        check_allocation(recipe(*BIG), names(count), gpus, words=WORDS)
    assert caught.value.what == (
        f"{here}; big needs 2 nodes with 8 GPUs each, for prefill 1 x 8 + decode 1 x 8 = 16 devices"
    )
    assert caught.value.todo == (
        "sbatch --nodes=2 --gres=gpu:8 slurm/disagg.sh recipes/big.yaml --set 'prefill.args.x=a b'"
    )
    assert caught.value.exit_code == 3


def test_excluded_nodes_do_not_count_and_are_excluded_by_the_line_to_type() -> None:
    made = recipe(*BIG, {"exclude_nodes": ["n1", "n2", "bad"]})
    assert usable_nodes(made, names(4)) == ("n0", "n3")
    assert check_allocation(made, names(4), 8, words=WORDS) is None
    with pytest.raises(PreflightError) as caught:
        check_allocation(made, names(3), 8, words=["r.yaml"])
    assert caught.value.what.startswith("this job has 3 nodes with 8 GPUs each, and the recipe excludes n1, n2; big")
    assert caught.value.todo == "sbatch --nodes=2 --gres=gpu:8 '--exclude=n[1-2],bad' slurm/disagg.sh r.yaml"


def test_a_job_of_the_right_shape_is_nothing_to_speak_of() -> None:
    assert check_allocation(recipe(*BIG), names(2), 8, words=WORDS) is None
    assert check_allocation(recipe(*BIG), names(2), None, words=WORDS) is None
    assert check_allocation(recipe(*BIG), names(1), 16, words=WORDS) is None
    idle = check_allocation(recipe(*BIG), names(4), 8, words=WORDS)
    assert idle == "this job has 4 nodes with 8 GPUs each; big leaves 2 nodes without work"


def test_on_a_cpu_nodes_are_counted_where_the_recipe_says_how_many() -> None:
    made = recipe({"slurm": {"nodes": 2}})
    assert check_allocation(made, names(2), 0, words=["r.yaml"]) is None
    with pytest.raises(PreflightError) as caught:
        check_allocation(made, names(1), 0, words=["r.yaml"])
    assert caught.value.what == "this job has 1 node; test needs 2 nodes"
    assert caught.value.todo == "sbatch --nodes=2 --gres=none slurm/disagg.sh r.yaml"


@given(
    tp=st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8])),
    instances=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    nodes=st.none() | st.integers(1, 6),
    size=st.sampled_from([0, 4, 8]),
)
def test_a_job_of_the_shape_that_is_asked_for_holds_the_recipe(
    tp: tuple[int, int], instances: tuple[int, int], nodes: int | None, size: int
) -> None:
    roles = {"prefill": {"instances": instances[0]}, "decode": {"instances": instances[1]}}
    made = recipe(on_gpus(*tp), roles, {"devices_per_node": size, "slurm": {"nodes": nodes}})
    shape = shape_or_none(made)
    if shape is not None:
        assert nodes in (None, shape.nodes)
        assert place(made, hosts(*[shape.gpus_per_node] * shape.nodes))
        check_allocation(made, names(shape.nodes), shape.gpus_per_node, words=["r.yaml"])


def shape_or_none(made: Any) -> JobShape | None:
    try:
        return job_shape(made)
    except RecipeError:
        return None
