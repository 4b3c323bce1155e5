"""`containers/*.Dockerfile`, as far as a docker without a registry goes: all are read by docker's own parser, and the
last stage of the CPU one is built on a stand-in for the stage before it. Real engines run in what was built."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve import __version__
from tests.cluster.cluster import Cluster
from tests.cluster.deployments import assert_all_proven, until_ready
from tests.containers.boxes import TINY_BOX, Boxes, contained
from tests.containers.daemon import Docker, docker_layers
from tests.containers.image import changes, write_image, write_runtime
from tests.launch.deployment import REPOSITORY

pytestmark = pytest.mark.container
ENGINES = "pdserve-test-engines:1"
BASES = {
    "cpu": "docker.io/library/python:3.11-slim-bookworm",
    "cuda": "docker.io/vllm/vllm-openai:${VLLM}",
    "rocm": "docker.io/vllm/vllm-openai-rocm:${VLLM}",
}
CHECK = "RUN python -m pdserve.installed.image_check cpu\n"


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Boxes]:
    """One node whose docker has the stand-in."""
    folder = tmp_path_factory.mktemp("build")
    runtime = write_runtime(folder)
    write_image(folder / "engines.tar", engines=folder)
    with Cluster.up(nodes=1, slurm=False, layers=docker_layers()) as cluster:
        docker = Docker(
            cluster,
            cluster.nodes[0],
            folder / "dockerd.log",
            options=[f"--add-runtime=mounting={runtime}", "--default-runtime=mounting"],
        )
        docker.start()
        try:
            docker.output("import", *changes(), str(folder / "engines.tar"), ENGINES)
            yield Boxes(cluster, {cluster.nodes[0]: docker}, tmp_path_factory.mktemp("box"))
        finally:
            docker.end(signal.SIGTERM)


@pytest.fixture
def docker(box: Boxes) -> Docker:
    return box.docker


def build(docker: Docker, file: Path, tag: str) -> subprocess.CompletedProcess[str]:
    return docker.call("build", "--force-rm", "--network=host", f"--file={file}", f"--tag={tag}", str(REPOSITORY))


def test_docker_reads_the_whole_file_and_then_wants_its_base(docker: Docker, tmp_path: Path) -> None:
    """Its parser comes before the first step; of an image that it has not it asks a registry."""
    for platform, name in BASES.items():
        done = build(docker, REPOSITORY / f"containers/{platform}.Dockerfile", f"{platform}:1")
        assert done.returncode != 0
        assert f" : FROM {name}" in done.stdout, done.stdout + done.stderr
        assert "registry-1.docker.io" in done.stderr
    wrong = tmp_path / "Dockerfile"
    wrong.write_text((REPOSITORY / "containers/rocm.Dockerfile").read_text() + "RUNS true\n")
    assert "unknown instruction: RUNS" in build(docker, wrong, "wrong:1").stderr, "else it shows nothing"


def last_stage(folder: Path, *, check: bool) -> Path:
    """Without compilation, which takes minutes of a busy machine."""
    _, end = (REPOSITORY / "containers/cpu.Dockerfile").read_text().split("FROM engines\n")
    assert end.count("PDSERVE_COMPILE=1") == end.count(CHECK) == 1
    text = f"FROM {ENGINES}\n{end}".replace("PDSERVE_COMPILE=1", "PDSERVE_COMPILE=0")
    file = folder / "Dockerfile"
    file.write_text(text if check else text.replace(CHECK, ""))
    return file


def test_the_check_of_the_image_ends_a_build_that_lacks_something(docker: Docker, tmp_path: Path) -> None:
    """It finds all but the one thing that was left out: vLLM, LMCache and Mooncake can be imported there, and vLLM
    finds the plugin of the pdserve that the build has installed."""
    done = build(docker, last_stage(tmp_path, check=True), "lacking:1")
    said = [line for line in done.stdout.splitlines() if "image: " in line]
    assert done.returncode == 1, done.stdout + done.stderr
    assert len(said) == 1, done.stdout + done.stderr
    assert "image: the proxy is not compiled" in said[0]


@pytest.fixture(scope="module")
def image(box: Boxes, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the build makes, but for the compiled proxy."""
    done = build(box.docker, last_stage(tmp_path_factory.mktemp("image"), check=False), "built:1")
    assert done.returncode == 0, done.stdout + done.stderr
    return "built:1"


def test_the_image_runs_pdserve(docker: Docker, image: str) -> None:
    assert docker.output("run", "--rm", "--network=host", image, "--version").startswith(f"pdserve {__version__}")
    listed = docker.output("run", "--rm", "--network=host", "--entrypoint=ls", image, "/")
    assert "build" not in listed.split()


@pytest.mark.timeout(1200)
def test_every_proof_is_proven_in_the_image(box: Boxes, image: str, cache: Path) -> None:
    """With the image's own Python and nothing mounted by the recipe."""
    # A worker in a process of its own is handed its work through shared memory.
    worker = {"env": {"VLLM_ENABLE_V1_MULTIPROCESSING": 1}}
    with box.up(box.node, contained(box.folder, cache, container={"image": image}, decode=worker)) as up:
        until_ready(up, TINY_BOX)
        assert_all_proven(up)
        assert box.inside(box.node).count("VLLM::EngineCore") == 2
        # A real engine leaves memory behind when it is killed.
        assert box.cluster.segments(box.node)
        box.docker.output("kill", box.container())
        assert "docker run ended with exit code 137" in up.expect("is lost while serving")
        assert up.ended() == "5"
    box.assert_nothing_left()
