"""Real vLLM, Mooncake and LMCache over two nodes of a real Slurm job: KV crosses the nodes' network."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.deployments import PATIENT, RECIPE, ClusterDeployment, Lab, assert_all_proven, until_ready
from tests.cluster.spec import LOGIN

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def tiny(shared_slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterDeployment]:
    lab = Lab(shared_slurm, tmp_path_factory.mktemp("real"))
    timeouts = [f"timeouts.{name}={value}" for name, value in PATIENT.items()]
    settings = ["slurm.nodes=2", "decode.restart.policy=never", *timeouts]
    deployment = lab.sbatch(RECIPE, "--nodes=2", "--gres=none", settings=settings)
    until_ready(deployment, "tiny-cpu")
    yield deployment
    deployment.lab.pdserve(LOGIN, "down", "tiny-cpu")
    shared_slurm.assert_nothing_left()


def test_prefill_and_decode_are_on_different_nodes_and_the_cache_beside_prefill(tiny: ClusterDeployment) -> None:
    first, second, _ = tiny.cluster.nodes
    places = {name: tiny.node_of(name) for name in ("lmcache-0", "prefill-0", "decode-0", "proxy")}
    assert places == {"lmcache-0": first, "prefill-0": first, "decode-0": second, "proxy": first}
    assert tiny.events("reached")[0]["side_channels"] == 1
    up = tiny.events("up")[0]
    print({name: value for name, value in up.items() if name.endswith("seconds")})


def test_every_proof_is_proven_over_the_nodes_network(tiny: ClusterDeployment) -> None:
    assert_all_proven(tiny)


def test_the_login_node_sees_what_listens_on_another_nodes_loopback(tiny: ClusterDeployment) -> None:
    done = tiny.lab.pdserve(LOGIN, "status", "tiny-cpu", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    processes = json.loads(done.stdout)["processes"]
    assert processes["lmcache-0"]["lmcache"]["workers"] == 1
    assert processes["decode-0"]["engine"]["running"] == 0


@pytest.mark.ends_fixture
def test_a_real_engine_that_dies_on_another_node_is_named_and_everything_is_stopped(tiny: ClusterDeployment) -> None:
    second = tiny.cluster.nodes[1]
    [core] = [pid for pid, argv in tiny.cluster.processes(second) if argv[0].startswith("VLLM::EngineCore")]
    os.kill(core, signal.SIGKILL)
    died = tiny.wait_for("died", name="decode-0")
    assert died["member"].startswith("VLLM::EngineCore")
    assert tiny.ended() == "FAILED"
    assert f"error: decode-0@{second}: VLLM::EngineCore" in tiny.printed()
    assert (tiny.run.failure).read_text().startswith("# tiny-cpu failed\n\n**VLLM::EngineCore")
    tiny.cluster.assert_nothing_left()
