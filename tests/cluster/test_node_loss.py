"""A node that is cut off, or dies without a word: who notices, what is said, what goes on, what stops by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.deployments import LIMIT, ClusterDeployment, Lab
from tests.cluster.spec import LOGIN
from tests.launch.deployment import wait_until

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def shared_slurm() -> Iterator[Cluster]:
    """A Slurm that lets a node be silent for long, as they do: what is seen here is seen by pdserve alone."""
    with Cluster.up(nodes=2, more=["SlurmdTimeout=300"]) as cluster:
        yield cluster


@pytest.fixture
def two(job: Lab) -> Iterator[Lab]:
    """Whatever happens, the cables are plugged in again."""
    yield job
    for node in job.cluster.nodes:
        job.cluster.heal(node)


def lose(up: ClusterDeployment, node: str, how: Callable[[str], None]) -> None:
    """Cut a node off, or its power; wait until the user is told."""
    how(node)
    up.expect(f"the agent of {node} is gone: not heard for")


def test_a_longer_cut_ends_the_deployment_and_the_cut_side_stops_by_itself(two: Lab) -> None:
    up = two.sbatch(two.recipe()).ready()
    node = up.node_of("decode-0")
    lose(up, node, two.cluster.cut)
    wait_until(f"nothing of ours on {node}, which hears nobody", lambda: not up.ours(node), LIMIT)
    up.expect(f"error: agent@{node}: node {node} is lost while serving, and with it decode-0: not heard for")
    first = up.node_of("proxy")
    wait_until(f"nothing of ours on {first}", lambda: not up.ours(first), LIMIT)
    assert up.state().phase == "failed"
    two.cluster.heal(node)
    assert up.ended() == "FAILED"
    assert up.ours(node) == []


def test_degrade_serves_on_with_the_rest_and_what_was_lost_does_not_come_back(two: Lab) -> None:
    of_each = {"prefill__instances": 2, "decode__instances": 2}
    up = two.sbatch(two.recipe(on_node_loss="degrade", **of_each), "--no-kill").ready()
    node = two.cluster.nodes[1]
    gone = sorted(name for name, process in up.state().processes.items() if process.node == node)
    assert gone == ["decode-1", "lmcache-1", "prefill-1"]
    lose(up, node, two.cluster.power_off)
    up.expect("deployment is degraded")
    assert [up.complete()[0] for _ in range(4)] == [200] * 4
    two.cluster.power_on(node)
    assert up.complete()[0] == 200
    assert two.pdserve(LOGIN, "status").stdout.startswith("fake: degraded")
    assert {up.state().processes[name].phase for name in gone} == {"dead"}
    two.pdserve(LOGIN, "down")
    wait_until("phase stopped", lambda: up.state().phase == "stopped", LIMIT, why=up.printed)
    up.ended()
