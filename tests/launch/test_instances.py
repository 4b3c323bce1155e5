"""Instances that are several processes, over nodes or with a server for each rank, live and die as one."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.errors import ServeError
from pdserve.plan.model import Plan
from pdserve.run.inbox import Restart
from tests.launch.played import Played, adapted, serving_deployment
from tests.plan import kit

pytestmark = pytest.mark.usefixtures("pdserve_home")

LEADER, FOLLOWER, RANK = "prefill-0", "prefill-0-node1", "prefill-0-rank1"


async def test_a_member_that_dies_while_the_others_load_ends_the_wait_for_them(tmp_path: Path) -> None:
    """The leader waits for its follower, for as long as an engine may take to load."""
    over_nodes = {"prefill": {"instances": 2, "parallel": {"nodes": 2, "tp": 2}}}
    planned = adapted(kit.plan(kit.recipe(kit.on_gpus(2, 1), over_nodes), *kit.hosts(2, 2, 2)), restart="on-failure")
    async with serving_deployment(tmp_path, planned) as deployment:
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


def ranks(restart: str) -> Plan:
    """A prefill of two ranks with a server each, and one decode."""
    prefill = {"parallel": {"dp": 2, "load_balancing": "external"}}
    return adapted(kit.plan(kit.recipe(kit.on_gpus(), {"prefill": prefill}), *kit.hosts(4)), restart=restart)


def routing(deployment: Played, name: str) -> list[str]:
    """What the proxy was told of a worker."""
    return [event["routing"] for event in deployment.events if event["event"] == "route" and event["name"] == name]


async def test_a_rank_that_dies_takes_its_instance_out_and_all_of_it_comes_back(tmp_path: Path) -> None:
    async with serving_deployment(tmp_path, ranks("on-failure")) as deployment:
        deployment.dies(RANK)
        await deployment.until(lambda: deployment.phases() == {"ready"})
        for name in (LEADER, RANK):
            assert deployment.orders_of(name) == ["stop", "start"]
            assert routing(deployment, name)[-3:] == ["dead", "starting", "ready"]


async def test_a_restart_or_the_death_of_one_rank_is_that_of_its_instance(tmp_path: Path) -> None:
    async with serving_deployment(tmp_path, ranks("never")) as deployment:
        assert (await deployment.ask(Restart(name=RANK))).exit_code == 0
        for name in (LEADER, RANK):
            assert deployment.orders_of(name) == ["stop", "start"]
            assert routing(deployment, name)[-3:] == ["draining", "starting", "ready"]
        deployment.dies(RANK)
        await deployment.over()
        assert isinstance(deployment.error, ServeError)
        assert deployment.error.where == f"{RANK}@host0"
