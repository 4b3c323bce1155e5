"""Real vLLM, Mooncake and LMCache inside of containers: `recipes/tiny-cpu.yaml` with a `container:` section."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.cluster.deployments import ClusterDeployment, assert_all_proven, until_ready
from tests.containers.boxes import TINY_BOX, Boxes, contained

pytestmark = [pytest.mark.container, pytest.mark.timeout(1200), pytest.mark.full]


@contextmanager
def over_ssh(boxes: Boxes, recipe: Path) -> Iterator[ClusterDeployment]:
    """Called on the node of the proxy, which listens on loopback: `verify` must reach it, and needs the key, too."""
    with boxes.up(boxes.node, recipe, "--cluster", boxes.hosts()) as up:
        yield up


@contextmanager
def in_a_job(boxes: Boxes, recipe: Path) -> Iterator[ClusterDeployment]:
    yield boxes.sbatch(recipe, "--gres=none")


@pytest.mark.parametrize(("started", "over"), [(over_ssh, "0"), (in_a_job, "COMPLETED")], ids=["ssh", "slurm"])
def test_every_proof_is_proven_between_containers_of_two_nodes(
    boxes: Boxes, cache: Path, started: Callable[[Boxes, Path], AbstractContextManager[ClusterDeployment]], over: str
) -> None:
    first, second = boxes.cluster.nodes
    with started(boxes, contained(boxes.folder, cache, slurm={"nodes": 2})) as up:
        until_ready(up, TINY_BOX)
        assert list(cache.rglob("modelinfos/*")), "the engines kept nothing in the compile cache"
        for node, engine in ((first, "prefill-0"), (second, "decode-0")):
            assert up.node_of(engine) == node
            assert boxes.inside(node).count("VLLM::EngineCore") == 1
        assert_all_proven(up)
        assert boxes.pdserve(first, "down", TINY_BOX).returncode == 0
        assert up.ended() == over
    boxes.assert_nothing_left()
