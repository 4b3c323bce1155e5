"""Which instance gets which devices, and what is said when they do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.errors import PreflightError, RecipeError
from pdserve.operations.plan_recipe import plan_for
from pdserve.plan.node import Node
from pdserve.plan.placement import Instance, nodes_for, place
from pdserve.recipe.load.loader import load_recipe
from tests.plan.kit import VERSIONS, hosts, on_gpus, recipe


def where(placed: tuple[Instance, ...]) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    return {i.name: [(share.node.name, share.devices) for share in i.shares] for i in placed}


def test_prefill_comes_first_and_each_instance_takes_the_next_devices() -> None:
    placed = place(recipe(on_gpus(2, 4), {"prefill": {"instances": 2}}), hosts(8))
    assert where(placed) == {
        "prefill-0": [("host0", (0, 1))],
        "prefill-1": [("host0", (2, 3))],
        "decode-0": [("host0", (4, 5, 6, 7))],
    }


def test_a_later_smaller_instance_fills_a_gap() -> None:
    placed = place(recipe(on_gpus(6, 2), {"prefill": {"instances": 2}}), hosts(8, 8))
    assert where(placed)["decode-0"] == [("host0", (6, 7))]


def test_named_devices_are_taken_as_they_are() -> None:
    named = {"prefill": {"devices": [6, 7, 0, 1], "instances": 2}, "decode": {"devices": [3, 5]}}
    placed = place(recipe(on_gpus(2, 2), named), hosts(8))
    assert where(placed) == {
        "prefill-0": [("host0", (6, 7))],
        "prefill-1": [("host0", (0, 1))],
        "decode-0": [("host0", (3, 5))],
    }
    offered = Node(name="half", devices=(2, 3, 6, 7))
    assert where(place(recipe(on_gpus(2, 2)), [offered]))["decode-0"] == [("half", (6, 7))]


def test_too_few_devices_show_the_sum_and_what_to_type() -> None:
    with pytest.raises(PreflightError) as caught:
        place(recipe(on_gpus(8, 8)), hosts(8), recipe_file="recipes/big.yaml")
    assert caught.value.exit_code == 3
    assert caught.value.what == "prefill 1 x 8 + decode 1 x 8 = 16 devices; this host has 8 (0-7)"
    assert caught.value.todo == (
        "to run it here: pdserve up recipes/big.yaml --set prefill.parallel.tp=4 --set decode.parallel.tp=4; "
        "as it is, it needs 2 nodes like this one: sbatch --nodes=2 --gres=gpu:8 slurm/disagg.sh recipes/big.yaml, "
        "or pdserve up recipes/big.yaml --cluster FILE"
    )


def test_only_the_wider_role_is_halved_when_that_is_enough() -> None:
    with pytest.raises(PreflightError) as caught:
        place(recipe(on_gpus(8, 1)), hosts(8))
    assert "pdserve up RECIPE --set prefill.parallel.tp=4;" in (caught.value.todo or "")


def test_a_host_without_devices_is_an_error_with_its_fix() -> None:
    with pytest.raises(PreflightError) as caught:
        place(recipe(on_gpus(platform="rocm")), hosts(0))
    assert caught.value.what == "prefill 1 x 1 + decode 1 x 1 = 2 devices; this host has 0"
    assert caught.value.todo == "run it on a host with rocm devices; recipes/tiny-cpu.yaml needs none"


def test_enough_devices_in_the_wrong_places_are_explained() -> None:
    with pytest.raises(PreflightError) as caught:
        place(recipe(on_gpus(8, 8)), hosts(8, 4, 4))
    assert caught.value.what.endswith("these 3 nodes have 16 (host0: 8, host1: 4, host2: 4)")
    assert caught.value.cause == "decode-0 needs 8 devices on one node, at most 4 are left on any"


def test_named_devices_that_are_not_there_are_named() -> None:
    with pytest.raises(PreflightError) as caught:
        place(recipe(on_gpus(2, 2), {"decode": {"devices": [8, 9]}}), hosts(8))
    assert caught.value.cause == "decode-0 asks for devices 8-9, which no node has left"


def test_hypothetical_nodes_are_as_many_as_needed_and_one_is_this_machine() -> None:
    assert nodes_for(recipe(on_gpus(4, 4), {"devices_per_node": 8})) == (Node(name="localhost", devices=(*range(8),)),)
    assert nodes_for(recipe()) == (Node(name="localhost"),)
    assert nodes_for(recipe(on_gpus(2, 1)))[0].devices == (0, 1, 2)
    two = nodes_for(recipe(on_gpus(8, 8), {"devices_per_node": 8}))
    assert [(node.name, len(node.devices)) for node in two] == [("node0", 8), ("node1", 8)]
    assert len({node.address for node in two}) == 2


def test_an_instance_wider_than_the_node_type_is_the_recipes_fault() -> None:
    with pytest.raises(RecipeError, match="an instance of prefill needs 8 devices of one node, and a node has 4"):
        nodes_for(recipe(on_gpus(8, 1), {"devices_per_node": 4}))


def test_advice_quotes_the_file_that_was_given_not_the_name_in_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("{schema: 1, name: other, platform: cuda, devices_per_node: 2, model: {id: a/b, served_name: b}}")
    with pytest.raises(PreflightError) as caught:
        plan_for(load_recipe(file, environ={}), hosts(1), run_dir="r", run_id="r", versions=VERSIONS)
    assert str(caught.value.todo).endswith(f"slurm/disagg.sh {file}, or pdserve up {file} --cluster FILE")
