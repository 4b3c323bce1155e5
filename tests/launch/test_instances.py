"""Recoveries of instances that are several processes: over nodes, or with a server for each rank."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.launch.played import adapted, played
from tests.plan import kit

pytestmark = pytest.mark.usefixtures("pdserve_home")

LEADER, FOLLOWER, RANK = "prefill-0", "prefill-0-node1", "prefill-0-rank1"


def test_a_member_that_dies_while_the_others_load_ends_the_wait_for_them(tmp_path: Path) -> None:
    """The leader waits for its follower, for as long as an engine may take to load."""
    over_nodes = {"prefill": {"instances": 2, "parallel": {"nodes": 2, "tp": 2}}}
    planned = adapted(kit.plan(kit.recipe(kit.on_gpus(2, 1), over_nodes), *kit.hosts(2, 2, 2)), restart="on-failure")

    async def scenario() -> None:
        async with played(tmp_path, planned) as deployment:
            await deployment.serving()
            deployment.held.add(("start", LEADER))
            deployment.dies(LEADER)
            await deployment.until(lambda: ("start", FOLLOWER) in deployment.orders)
            await deployment.until(lambda: deployment.phase(FOLLOWER) == "ready")
            deployment.orders.clear()
            deployment.held.add(("stop", LEADER))
            deployment.dies(FOLLOWER)
            await deployment.until(lambda: ("stop", LEADER) in deployment.orders)
            assert deployment.state.processes[LEADER].note == f"{FOLLOWER} exited"
            deployment.obey_all()
            await deployment.until(lambda: deployment.phases() == {"ready"})
            assert deployment.orders.count(("start", FOLLOWER)) == 1

    asyncio.run(scenario())


def test_a_rank_that_is_silent_when_the_recovery_of_its_instance_ends_is_given_up(tmp_path: Path) -> None:
    ranks = {"dp": 2, "ep": True, "load_balancing": "external"}
    two = kit.plan(kit.recipe(kit.on_gpus(1, 1), {"prefill": {"instances": 2, "parallel": ranks}}), *kit.hosts(8))

    async def scenario() -> None:
        async with played(tmp_path, adapted(two, restart="on-failure", unresponsive_seconds=0.05)) as deployment:
            await deployment.serving()
            answered = deployment.slow[deployment.canary_of(LEADER)] = asyncio.Event()
            deployment.dies(LEADER)
            await deployment.until(lambda: any(canary_ok(event, RANK) for event in deployment.events))
            deployment.is_silent(RANK)
            await deployment.looks()
            deployment.orders.clear()
            answered.set()
            await deployment.until(lambda: ("start", RANK) in deployment.orders)
            await deployment.until(lambda: deployment.phases() == {"ready"})

    asyncio.run(scenario())


def canary_ok(event: dict[str, Any], name: str) -> bool:
    return event["event"] == "canary" and event["name"] == name and bool(event["ok"])
