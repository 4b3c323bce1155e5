"""Real vLLM, Mooncake and LMCache inside of a container: `recipes/tiny-cpu.yaml` with a `container:` section."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.cluster.deployments import Deployment
from tests.cluster.waiting import wait_until
from tests.containers.boxes import Boxes
from tests.containers.image import IMAGE, host_mounts, limits
from tests.launch.deployment import REPOSITORY

pytestmark = [pytest.mark.container, pytest.mark.timeout(1200)]
_START_SECONDS = 900


def contained(folder: Path, **changes: object) -> Path:
    """The recipe of the repository in a container, for a user who adds nothing else."""
    container: dict[str, object] = {"kind": "docker", "image": IMAGE, "python": sys.executable, "mounts": host_mounts()}
    container["options"] = limits()
    recipe = {"extends": str(REPOSITORY / "recipes/tiny-cpu.yaml"), "name": "tiny-box", "container": container}
    file = folder / "tiny-box.yaml"
    file.write_text(yaml.safe_dump(recipe | changes, sort_keys=False))
    return file


def until_ready(up: Deployment) -> None:
    up.name = "tiny-box"

    def over() -> bool:
        return "serving tiny at" in up.printed() or "\nerror: " in f"\n{up.printed()}"

    wait_until("ready", over, _START_SECONDS, why=up.printed)
    assert "serving tiny at" in up.printed(), up.printed()


@pytest.fixture
def tiny(box: Boxes) -> Iterator[Deployment]:
    with box.up(box.node, contained(box.folder)) as up:
        until_ready(up)
        yield up


def test_every_proof_is_proven_inside(tiny: Deployment, box: Boxes) -> None:
    done = box.pdserve(box.node, "verify", "tiny-box", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert {proof["name"]: proof["status"] for proof in report["proofs"]} == dict.fromkeys(
        ("endpoints", "requests", "transfer", "stored", "output", "reload", "clean"), "proven"
    ), done.stdout
    inside = box.docker.output("top", box.container(), "-o", "pid,args")
    assert inside.count("VLLM::EngineCore") == 2, inside
    # A real engine leaves memory behind when it is killed.
    assert box.cluster.segments(box.node)
    box.docker.output("kill", box.container())
    assert "docker run ended with exit code 137" in tiny.expect("is lost while serving")
    assert tiny.ended() == "5"
    box.assert_nothing_left()
