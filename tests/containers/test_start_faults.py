"""What keeps a container from starting: named before anything else starts, with its cause and what to do."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.deployments import PDSERVE
from tests.containers.boxes import Boxes

pytestmark = pytest.mark.container
HANG_SECONDS = 60.0
"""25 s, and what a busy machine takes on top."""


def refused(box: Boxes, recipe: Path, *arguments: str) -> str:
    """What `up` says of it, on stderr; nothing of it is left."""
    done = box.pdserve(box.node, "up", recipe, *arguments)
    assert done.returncode == 3, done.stdout + done.stderr
    return done.stderr


def test_an_image_that_is_not_there(box: Boxes) -> None:
    keys = ("--set", "container.image=registry.invalid/vllm:9", "--set", "container.disk_gib=0.01")
    output = refused(box, box.boxed(), *keys)
    assert f"image@{box.node}: registry.invalid/vllm:9 cannot be fetched on {box.node}" in output
    assert "likely cause: the registry cannot be reached from there" in output
    assert "docker load" in output


@pytest.fixture
def without_vllm(tmp_path: Path) -> Path:
    """An interpreter that has all that this one has, but vLLM."""
    packages = tmp_path / "bare/lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    packages.mkdir(parents=True)
    (tmp_path / "bare/bin").mkdir()
    (tmp_path / "bare/bin/python3").symlink_to(Path(sys.executable).resolve())
    shutil.copy(Path(sys.prefix) / "pyvenv.cfg", tmp_path / "bare/pyvenv.cfg")
    there = Path(sys.prefix).resolve() / packages.relative_to(tmp_path / "bare")
    for entry in there.iterdir():
        if not entry.name.startswith("vllm"):
            (packages / entry.name).symlink_to(entry)
    return tmp_path / "bare"


def test_an_image_without_vllm(box: Boxes, without_vllm: Path) -> None:
    recipe = box.boxed(engine__command=None)
    mounts = [f"{without_vllm}:{without_vllm}:ro"]
    text = recipe.read_text()
    recipe.write_text(text.replace("  mounts:\n", f"  mounts:\n  - {mounts[0]}\n"))
    output = refused(box, recipe, "--set", f"container.python={without_vllm}/bin/python3")
    assert "vllm is not installed" in output, output


@pytest.mark.full
def test_a_docker_that_hangs(box: Boxes) -> None:
    """Its socket accepts, and nothing is answered."""
    with box.docker.hanging():
        output = refused(box, box.boxed())
    assert f"docker cannot be asked for images in time on {box.node}" in output
    assert "likely cause: no answer of docker within 30 s: dockerd there hangs" in output
    assert "journalctl -u docker" in output


@pytest.mark.parametrize(
    ("program", "said", "exit_code"),
    [
        ("preflight.node_probe", "docker does not answer on {node}: nothing comes out of its containers", "3"),
        ("pdserve.node.agent", "node {node} is lost while starting, and with it", "4"),
    ],
    ids=["before the look at the node", "before the agent"],
)
@pytest.mark.full
def test_a_docker_that_hangs_once_the_image_was_looked_at(box: Boxes, program: str, said: str, exit_code: str) -> None:
    """It stops at the moment in which its client is called for a container."""
    folder = box.folder / "bin"
    folder.mkdir()
    script = folder / "docker"
    stop = f'case "$*" in *{program}*) kill -STOP "$(cat /run/docker.pid)"; date +%s.%N >{folder}/stopped;; esac'
    script.write_text(f'#!/bin/sh\n{stop}\nexec /usr/bin/docker "$@"\n')
    script.chmod(0o755)
    try:
        with box.up(box.node, box.boxed(), env={"PATH": f"{folder}:{box.env['PATH']}"}) as up:
            up.expect(said.format(node=box.node))
            waited = time.time() - float((folder / "stopped").read_text())
            assert waited < HANG_SECONDS
            assert "likely cause: no answer of docker within 20 s: dockerd there hangs" in up.expect("likely cause:")
            assert "journalctl -u docker" in up.expect("what to do:")
            assert up.ended() == exit_code
    finally:
        box.docker.send(signal.SIGCONT)
    if exit_code == "4":  # of what was refused before there is nothing to clear up
        assert box.pdserve(box.node, "down").returncode == 0
    box.assert_nothing_left()


def test_a_docker_that_is_not_installed(box: Boxes) -> None:
    recipe = box.boxed()
    folder = box.folder / "bin"
    folder.mkdir()
    done = box.cluster.run(box.node, ["env", f"PATH={folder}", *PDSERVE, "up", str(recipe)], env=box.env)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "docker cannot be run here: No such file or directory" in done.stderr
    assert "install docker on the machine where pdserve is called" in done.stderr


def test_preflight_looks_from_inside_and_leaves_nothing(box: Boxes) -> None:
    done = box.pdserve(box.node, "preflight", box.boxed())
    assert done.returncode == 0, done.stdout + done.stderr
    assert box.left() == []
    assert not any(box.home.glob("fake/*"))


def test_an_engine_that_dies_inside_is_named_with_its_last_words(box: Boxes) -> None:
    # Without a segment: one that is made in the last milliseconds of a process is not seen to be of ours.
    dies = {"FAKE_DIE_AT": "load", "FAKE_LAST_LINES": "RuntimeError: no such weights", "FAKE_SHM": ""}
    with box.up(box.node, box.boxed(decode__env=dies)) as up:
        up.expect("error: decode-0@")
        up.expect("RuntimeError: no such weights")
        assert up.ended() == "4"
