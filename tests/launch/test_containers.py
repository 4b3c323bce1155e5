"""Containers that outlive their agent's pipe, with a `docker` that remembers what it was told."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pdserve.plan.node import Local, Node
from pdserve.reach import containers
from pdserve.reach.containers import LeftContainers, left_containers, stop_left_containers, until_docker_hangs

pytestmark = pytest.mark.process


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Lists the ids of a file; stopping one takes it out."""
    (tmp_path / "ids").write_text("")
    program = tmp_path / "docker"
    program.write_text(
        f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\n'
        f"case $1 in ps) cat {tmp_path}/ids ;; stop) : >{tmp_path}/ids ;; esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


BOXED = Node(name="gpu1", command=("docker", "run", "--rm", "vllm:1", "python3"))


async def test_what_is_left_of_this_run_is_stopped_and_a_look_stops_nothing(docker: Path) -> None:
    (docker / "ids").write_text("0123456789abcdef\n")
    assert (await left_containers([BOXED], "run-1")).names == ("0123456789ab on gpu1",)
    assert (docker / "ids").read_text() == "0123456789abcdef\n"
    assert await stop_left_containers([BOXED], "run-1") == LeftContainers(("0123456789ab on gpu1",))
    *_, listed, stopped = (docker / "calls").read_text().splitlines()
    assert "label=pdserve.run=run-1" in listed
    assert "label=pdserve.node=gpu1" in listed
    assert stopped.split()[-1] == "0123456789abcdef"
    assert (docker / "ids").read_text() == ""
    assert await stop_left_containers([BOXED], "run-1") == LeftContainers()
    assert (docker / "calls").read_text().count("stop ") == 1, "nothing left is nothing to stop"


async def test_docker_is_not_asked_where_no_agent_was_in_it(docker: Path) -> None:
    nodes = [Node(name="bare"), Node(name="venv", command=("/v/python",))]
    assert await stop_left_containers(nodes, "r") == LeftContainers()
    assert not (docker / "calls").exists()


@pytest.mark.parametrize("until_then", ["exec sleep 1000", "echo 20.10", "echo permission denied >&2; exit 1"])
async def test_a_docker_that_answers_no_more_hangs(
    docker: Path, monkeypatch: pytest.MonkeyPatch, until_then: str
) -> None:
    """What refuses does not: what keeps a container from coming is in the output of its own start then."""
    for name, seconds in (("_FIRST_SECONDS", 0.0), ("_EVERY_SECONDS", 0.0), ("_ANSWER_SECONDS", 1)):
        monkeypatch.setattr(containers, name, seconds)
    (docker / "logs").mkdir()
    calls = f'echo "$*" >>{docker}/calls; if [ $(wc -l <{docker}/calls) -gt 2 ]; then exec sleep 1000; fi'
    (docker / "docker").write_text(f"#!/bin/sh\n{calls}\n{until_then}\n")
    await asyncio.wait_for(until_docker_hangs(Local(), "a", docker / "logs"), 120)
    assert len((docker / "calls").read_text().splitlines()) == (1 if "sleep" in until_then else 3)


async def test_a_docker_that_does_not_answer_is_no_docker_without_containers(docker: Path) -> None:
    (docker / "docker").write_text("#!/bin/sh\necho Cannot connect to the Docker daemon >&2\nexit 1\n")
    unknown = ("gpu1 (Cannot connect to the Docker daemon)",)
    assert await stop_left_containers([BOXED], "run-1") == LeftContainers(unknown=unknown)
