"""Instances that are several processes, over nodes or with a server for each rank, live and die as one."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.launch.deployment import (
    BODY,
    Deployment,
    assert_nothing_left,
    free_ports,
    pdserve,
    recipe,
    routing,
    until,
    up,
)
from tests.launch.played import adapted, serving_deployment
from tests.plan import kit

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("pdserve_home")]

LEADER, FOLLOWER, RANK = "prefill-0", "prefill-0-node1", "prefill-0-rank1"
RANKS = (LEADER, RANK)


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


@contextmanager
def serving(folder: Path, home: Path, policy: str) -> Iterator[Deployment]:
    """Two prefill ranks with a server each, and one decode."""
    file = recipe(
        folder,
        lmcache=None,
        prefill={
            "connector": {"kind": "mooncake", "protocol": "tcp"},
            "parallel": {"dp": 2, "load_balancing": "external"},
            "restart": {"policy": policy, "backoff_seconds": 0.1},
        },
        ports__dp_master=free_ports(10)[-1],
    )
    (folder / "model" / "config.json").write_text('{"num_local_experts": 4}')
    with up(file, home) as deployment:
        deployment.command.expect("serving fake at")
        yield deployment


def prefilled(deployment: Deployment) -> list[str]:
    """The prefills of four requests, by the proxy's log."""
    before = len(proxy_log(deployment))
    assert [deployment.post("/v1/completions", BODY)[0] for _ in range(4)] == [200] * 4
    until(lambda: len(proxy_log(deployment)) >= before + 4)  # lines are written a moment later
    return [name for line in proxy_log(deployment)[before:] for name in RANKS[::-1] if name in line]


def proxy_log(deployment: Deployment) -> list[str]:
    process = deployment.run.read_plan().process("proxy")
    return [line for line in (deployment.run.path / process.log).read_text().splitlines() if "completions" in line]


def test_a_rank_that_dies_takes_its_instance_out_and_all_of_it_comes_back(tmp_path: Path, pdserve_home: Path) -> None:
    with serving(tmp_path, pdserve_home, "on-failure") as deployment:
        assert [worker.name for worker in deployment.run.read_plan().proxy.workers] == [*RANKS, "decode-0"]
        before = {name: deployment.id_of(name) for name in RANKS}
        deployment.send_signal(RANK, signal.SIGKILL)
        deployment.command.expect("prefill-0    restart 1")
        deployment.command.expect("deployment is ready")
        for name in RANKS:
            assert deployment.id_of(name) != before[name]
            assert routing(deployment, name)[-3:] == ["dead", "starting", "ready"]
        assert set(prefilled(deployment)) == set(RANKS)


def test_a_restart_or_the_death_of_one_rank_is_that_of_its_instance(tmp_path: Path, pdserve_home: Path) -> None:
    with serving(tmp_path, pdserve_home, "never") as deployment:
        before = {name: deployment.id_of(name) for name in RANKS}
        code, output = pdserve("restart", RANK)
        assert code == 0, output
        for name in RANKS:
            assert deployment.id_of(name) != before[name]
            assert routing(deployment, name)[-3:] == ["draining", "starting", "ready"]
        assert set(prefilled(deployment)) == set(RANKS)
        deployment.send_signal(RANK, signal.SIGKILL)
        assert deployment.command.finish() == 5
        assert f"error: {RANK}@" in deployment.command.output
        assert_nothing_left(deployment)
