"""Real vLLM, Mooncake and LMCache inside of containers: `recipes/tiny-cpu.yaml` with a `container:` section."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.deployments import assert_all_proven, until_ready
from tests.containers.boxes import TINY_BOX, Boxes, contained

pytestmark = [pytest.mark.container, pytest.mark.timeout(1200), pytest.mark.full]


def test_every_proof_is_proven_between_containers_of_two_nodes(boxes: Boxes, cache: Path) -> None:
    """By ssh; in a Slurm job the way of what is proven is the same."""
    first, second = boxes.cluster.nodes
    recipe = contained(boxes.folder, cache, slurm={"nodes": 2})
    # Called on the node of the proxy, which listens on loopback: `verify` must reach it, and needs the key, too.
    with boxes.up(first, recipe, "--cluster", boxes.hosts()) as up:
        until_ready(up, TINY_BOX)
        assert list(cache.rglob("modelinfos/*")), "the engines kept nothing in the compile cache"
        for node, engine in ((first, "prefill-0"), (second, "decode-0")):
            assert up.node_of(engine) == node
            assert boxes.inside(node).count("VLLM::EngineCore") == 1
        assert_all_proven(up)
        assert boxes.pdserve(first, "down", TINY_BOX).returncode == 0
        assert up.ended() == "0"
    boxes.assert_nothing_left()
