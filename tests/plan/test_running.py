"""A new plan for a deployment that runs leaves what runs where it is, and so as it is."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.errors import PreflightError
from pdserve.plan.model import Plan
from pdserve.plan.placement import device_sum
from pdserve.plan.running import RunningProcesses
from pdserve.recipe.model import Recipe
from tests.plan.kit import MOONCAKE, MULTI, NIXL, hosts, on_gpus, plan, recipe, with_lmcache

Place = tuple[str, tuple[int, ...]]


def next_plan(running: Plan, before: Recipe, wanted: Recipe) -> Plan:
    return plan(wanted, *running.nodes, running=RunningProcesses(running, before.ports))


def places(built: Plan) -> dict[str, Place]:
    return {process.name: (process.node, process.devices) for process in built.processes if process.is_engine}


def restarted(running: Plan, new: Plan) -> set[str]:
    """Of what runs, all that would not go on as it is, but for the proxy: it is told of its workers."""
    planned = {process.name: process for process in new.processes}
    return {
        process.name
        for process in running.processes
        if process.name in planned and not process.is_proxy and process != planned[process.name]
    }


def on_nixl(prefill: int, decode: int, change: dict[str, Any] | None = None) -> Recipe:
    sides = {"prefill": {"instances": prefill}, "decode": {"instances": decode}}
    connectors = {name: {"connector": NIXL, **side} for name, side in sides.items()}
    return recipe(on_gpus(), connectors, change or {})


def test_what_goes_leaves_a_hole_that_the_next_one_takes_and_hosts_in_another_order_move_nothing() -> None:
    first, second = on_nixl(2, 2), on_nixl(1, 2)
    two = plan(first, *hosts(2, 2))
    assert not restarted(two, plan(first, *reversed(two.nodes), running=RunningProcesses(two, first.ports)))
    running = plan(first, *hosts(8))
    new = next_plan(running, first, second)
    assert places(new) == {name: place for name, place in places(running).items() if name != "prefill-1"}
    third = next_plan(new, second, on_nixl(1, 3))
    assert places(third)["decode-2"] == places(running)["prefill-1"]
    assert not restarted(new, third)


def test_an_instance_of_another_shape_is_placed_anew_beside_those_that_stay() -> None:
    before = on_nixl(1, 2)
    new = next_plan(plan(before, *hosts(8)), before, on_nixl(1, 2, {"prefill": {"parallel": {"tp": 2}}}))
    assert places(new) == {
        "prefill-0": ("host0", (0, 3)),
        "decode-0": ("host0", (1,)),
        "decode-1": ("host0", (2,)),
    }


def test_devices_that_the_recipe_names_count_more_than_those_that_are_held() -> None:
    before = on_nixl(1, 1)
    running = plan(before, *hosts(8))
    named = next_plan(running, before, on_nixl(1, 1, {"prefill": {"devices": [5]}}))
    assert places(named) == {"prefill-0": ("host0", (5,)), "decode-0": ("host0", (1,))}
    same = next_plan(running, before, on_nixl(2, 1, {"prefill": {"devices": [0, 6]}}))
    assert places(same) == {**places(running), "prefill-1": ("host0", (6,))}
    with pytest.raises(PreflightError) as caught:
        next_plan(running, before, on_nixl(1, 1, {"prefill": {"devices": [1]}}))
    assert caught.value.todo is not None
    assert "pdserve down test" in caught.value.todo


def test_what_comes_takes_nothing_of_what_goes_while_there_is_room_elsewhere() -> None:
    """It is started first. On full nodes it has to wait for its place."""
    before, after = on_nixl(2, 1), on_nixl(1, 2)
    for devices, place in ((4, 3), (3, 1)):
        running = plan(before, *hosts(devices))
        assert places(next_plan(running, before, after))["decode-1"] == ("host0", (place,))
    wider = on_nixl(1, 2, {"decode": {"parallel": {"tp": 2}}})
    running = plan(after, *hosts(6))
    assert [places(next_plan(running, after, wider))[f"decode-{i}"][1] for i in (0, 1)] == [(1, 3), (2, 4)]


def test_what_comes_waits_for_what_goes_where_only_that_has_room() -> None:
    """prefill-3 alone could have been placed apart; decode-0, which becomes wider, then nowhere."""
    before = on_nixl(3, 1)
    running = plan(before, *hosts(2, 2, 2))
    new = next_plan(running, before, on_nixl(4, 1, {"decode": {"parallel": {"tp": 2}}}))
    assert places(new) == {**places(running), "prefill-3": ("host1", (1,)), "decode-0": ("host2", (0, 1))}
    assert new.process("prefill-3").ports["nixl"] not in (5600, running.process("decode-0").ports["nixl"])


def test_no_room_beside_what_runs_says_whether_a_new_start_has_it() -> None:
    before = on_nixl(1, 3)
    running = plan(before, *hosts(2, 2))
    for wanted, helps in ((on_nixl(2, 3), False), (on_nixl(1, 2, {"prefill": {"parallel": {"tp": 2}}}), True)):
        with pytest.raises(PreflightError) as caught:
            next_plan(running, before, wanted)
        assert device_sum(wanted) in caught.value.render()
        assert ("pdserve down test" in (caught.value.todo or "")) is helps


def test_instances_on_cpus_keep_their_nodes_and_new_ones_go_where_the_fewest_are() -> None:
    sides = {name: {"connector": MOONCAKE} for name in ("prefill", "decode")}
    before = recipe(sides, {"prefill": {"instances": 2}})
    running = plan(before, *hosts(0, 0, 0))
    assert places(running) == {"prefill-0": ("host0", ()), "prefill-1": ("host1", ()), "decode-0": ("host2", ())}
    fewer = next_plan(running, before, recipe(sides))
    assert places(fewer) == {"prefill-0": ("host0", ()), "decode-0": ("host2", ())}
    more = next_plan(fewer, recipe(sides), recipe(sides, {"decode": {"instances": 3}}))
    assert places(more) == {**places(fewer), "decode-1": ("host1", ()), "decode-2": ("host0", ())}


def test_an_lmcache_server_keeps_its_name_and_command_whoever_attaches() -> None:
    both = {"connector": MULTI}
    attach = with_lmcache(on=["prefill", "decode"])
    before = recipe(attach, {"prefill": both, "decode": both})
    running = plan(before, *hosts(0, 0, 0))
    new = next_plan(running, before, recipe(attach, {"prefill": {**both, "instances": 3}, "decode": both}))
    nodes = {server.process: new.process(server.process).node for server in new.lmcache}
    assert nodes == {"lmcache-0": "host0", "lmcache-1": "host1", "lmcache-2": "host2"}
    assert not restarted(running, new)
    counted = {server.process: (server.engines, server.expected_workers) for server in new.lmcache}
    assert counted["lmcache-0"] == (("prefill-0", "prefill-2"), 2)
    given = recipe(attach, {"lmcache": {"max_workers": 3}}, {"prefill": both, "decode": both})
    assert "lmcache-0" in restarted(running, next_plan(running, before, given))


def test_a_node_that_was_set_up_keeps_its_number() -> None:
    setup: dict[str, Any] = {"setup": ["prepare", "check"]}
    before = on_nixl(1, 1, setup)
    running = plan(before, *hosts(1, 1, 2))
    new = next_plan(running, before, on_nixl(3, 1, setup))
    assert not restarted(running, new)
    assert {process.name for process in new.processes if process.is_setup} - set(running.names()) == {
        "setup-0-node2",
        "setup-1-node2",
    }
