"""The image and the compile cache of a container, provided before anything starts, with tools that play their part."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import PreflightError
from pdserve.plan.container import pull_progress, shared_file
from pdserve.plan.node import Local
from pdserve.preflight import container_images
from pdserve.preflight.container_images import Report, provide_images
from pdserve.reach.candidates import Candidate
from tests.plan.kit import recipe
from tests.tables import each_row

pytestmark = pytest.mark.process

ONE = (Candidate("gpu1", Local(), "gpu1"),)
TWO = (*ONE, Candidate("gpu2", Local(), "gpu2"))
ID = f"sha256:{'0' * 64}"
PULLED = "1.0: Pulling from org/vllm\n0123456789ab: Pulling fs layer\n0123456789ab: Pull complete\n"
NOT_THERE = "Error: No such image: org/vllm:1"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory, and an empty folder of tools before the system's."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "run-1").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    return tmp_path


def tool(here: Path, name: str, *lines: str) -> None:
    """A shell script that notes how it was called."""
    program = here / "bin" / name
    program.write_text("\n".join(("#!/bin/sh", f'echo "{name} $*" >>{here}/calls', *lines, "")))
    program.chmod(0o755)


def docker(here: Path, *, pull: str, there: bool = False) -> None:
    """One that has the image once `pull` has ended well."""
    (here / "has").unlink(missing_ok=True)
    if there:
        (here / "has").touch()
    tool(
        here,
        "docker",
        'case "$1" in',
        f"  image) if [ -e {here}/has ]; then echo {ID}; else echo '{NOT_THERE}' >&2; exit 1; fi ;;",
        f"  info) echo {here} ;;",
        f"  pull) {pull} ;;",
        "esac",
    )


def provide(
    here: Path,
    machines: Sequence[Candidate] = ONE,
    seconds: float = 60,
    report: Report | None = None,
    sides: Mapping[str, Any] | None = None,
    **container: Any,
) -> list[str]:
    """What the user reads."""
    lines: list[str] = []
    section = {"kind": "docker", "disk_gib": 0.001, **container}
    changes = {"image": "org/vllm:1", "container": section, "timeouts": {"container_seconds": seconds}}
    made, store = recipe({**(sides or {})}, changes), str(here / "images")
    asyncio.run(provide_images(machines, made, run_dir=here / "run-1", store=store, report=report or lines.append))
    return lines


def refused(here: Path, machines: Sequence[Candidate] = ONE, **keys: Any) -> PreflightError:
    with pytest.raises(PreflightError) as caught:
        provide(here, machines, **keys)
    return caught.value


def calls(here: Path) -> list[str]:
    return (here / "calls").read_text().splitlines()


def test_an_image_that_is_there_is_not_fetched(here: Path) -> None:
    docker(here, pull="exit 9", there=True)
    assert provide(here) == []
    assert calls(here) == ["docker image inspect --format={{.Id}} org/vllm:1"]


def test_one_that_is_not_is_fetched_once_with_its_limit_said(here: Path) -> None:
    docker(here, pull=f"printf '{PULLED}'; touch {here}/has")
    first, last = provide(here)
    assert "fetching org/vllm:1 (at most 60 s: timeouts.container_seconds)" in first
    assert "gpu1 has it after" in last
    assert [line.split()[1] for line in calls(here)] == ["image", "info", "pull", "image"]
    assert "Pull complete" in (here / "run-1" / "logs" / "image@gpu1.log").read_text()


def test_its_progress_is_shown_while_it_runs(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container_images, "_QUIET_SECONDS", 0.0)
    fifo = here / "go"
    os.mkfifo(fifo)
    docker(here, pull=f"printf '{PULLED}'; read line <{fifo}; touch {here}/has")
    lines: list[str] = []

    def report(line: str) -> None:
        lines.append(line)
        if "layers" in line and sum("layers" in shown for shown in lines) == 1:
            fifo.write_text("go\n")

    provide(here, report=report)
    assert "image: gpu1: 1 of 1 layers downloaded, 1 unpacked" in lines


def test_one_that_takes_too_long_is_stopped_and_the_key_named(here: Path) -> None:
    docker(here, pull=f"echo $$ >{here}/pid; exec sleep 600")
    error = refused(here, seconds=3)
    assert error.what == "org/vllm:1 cannot be fetched in time on gpu1"
    assert "timeouts.container_seconds" in (error.todo or "")
    assert not Path(f"/proc/{(here / 'pid').read_text().strip()}").exists()


def test_a_disk_without_room_is_named_before_the_fetch(here: Path) -> None:
    docker(here, pull="exit 9")
    error = refused(here, disk_gib=1e9)
    assert f"the disk of {here} on gpu1 has " in error.what
    assert error.where == "container.disk_gib"
    assert not any("pull" in line for line in calls(here))


def test_every_node_that_cannot_have_it_is_named_with_its_cause(here: Path) -> None:
    docker(here, pull="echo 'manifest for org/vllm:1 not found: manifest unknown' >&2; exit 1")
    error = refused(here, TWO)
    assert error.what == "2 of 2 nodes cannot have the container: gpu1, gpu2"
    assert "the registry has no such image" in (error.cause or "")
    assert any("org/vllm:1 cannot be fetched on gpu2" in line for line in error.evidence)


def test_a_node_without_docker_is_told_so(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(here / "bin"))
    error = refused(here)
    assert error.what == "docker cannot be run here: No such file or directory"
    assert "install docker on the machine where pdserve is called" in (error.todo or "")


def test_nodes_with_different_images_under_one_tag_are_refused(here: Path) -> None:
    docker(here, pull="exit 9", there=True)
    tool(here, "docker", 'echo "sha256:$(printf "%064d" $$)"')
    error = refused(here, TWO)
    assert error.what == "the nodes have different images under org/vllm:1"
    assert "digest" in (error.todo or "")


@pytest.mark.parametrize(
    ("kind", "name", "output"), [("apptainer", "apptainer", "$2"), ("pyxis", "enroot", "${2#--output=}")]
)
def test_one_node_makes_the_file_that_all_use_and_the_next_start_takes_it(
    here: Path, kind: Any, name: str, output: str
) -> None:
    tool(here, name, f'echo layers >"{output}"')
    lines = provide(here, TWO, kind=kind)
    assert any("gpu1 has it after" in line for line in lines)
    file = Path(shared_file(kind, "org/vllm:1", str(here / "images")) or "")
    assert file.read_text() == "layers\n"
    assert [path.name for path in file.parent.iterdir()] == [file.name], "no part of it is left"
    assert provide(here, TWO, kind=kind) == []
    assert len(calls(here)) == 1


def test_an_import_that_fails_or_lands_on_another_disk_leaves_no_file(here: Path) -> None:
    tool(here, "enroot", "true")
    assert "is not the same folder on that node" in (refused(here, TWO, kind="pyxis").cause or "")
    tool(here, "apptainer", 'echo half >"$2"; echo "FATAL: write: no space left on device" >&2; exit 255')
    assert "a disk of gpu1 is full" in (refused(here, kind="apptainer").cause or "")
    assert list((here / "images").iterdir()) == []


def test_an_image_file_must_be_there_on_every_node(here: Path) -> None:
    error = refused(here, kind="apptainer", image=f"{here}/absent.sif")
    assert error.what == f"gpu1 cannot read {here}/absent.sif"
    (here / "absent.sif").touch()
    assert provide(here, kind="apptainer", image=f"{here}/absent.sif") == []


def test_a_compile_cache_is_the_users_own_and_cold_until_it_holds_something(here: Path) -> None:
    docker(here, pull="exit 9", there=True)
    [line] = provide(here, compile_cache=str(here / "cache"))
    [folder] = (here / "cache").iterdir()
    assert line == f"compile cache {folder} on gpu1: cold: kernels are compiled by this start"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (folder / "triton").mkdir()
    (folder / "triton" / "kernel.so").touch()
    assert provide(here, compile_cache=str(here / "cache")) == [f"compile cache {folder} on gpu1: warm"]
    folder.chmod(0o777)
    error = refused(here, compile_cache=str(here / "cache"))
    assert error.where == "container.compile_cache"
    assert "loaded as code" in (error.cause or ""), "others could write it"


@each_row("protocol, leave_out, asked", [("rdma", [], True), ("tcp", [], False), ("rdma", ["--device"], False)])
def test_a_node_without_the_device_files_of_rdma_is_named(
    here: Path, protocol: str, leave_out: list[str], asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The container would not start, and docker names a device and no cause."""
    docker(here, pull="exit 9", there=True)
    monkeypatch.setattr(container_images, "VERBS", str(here / "infiniband"))
    sides = {side: {"connector": {"kind": "mooncake", "protocol": protocol}} for side in ("prefill", "decode")}
    if asked:
        error = refused(here, sides=sides, leave_out=leave_out)
        assert error.what == f"gpu1 has no {here}/infiniband"
        assert "protocol: tcp" in (error.todo or "")
    else:
        provide(here, sides=sides, leave_out=leave_out)


def test_layers_are_counted_by_their_last_state() -> None:
    text = "a" * 12 + ": Pulling fs layer\n" + "b" * 12 + ": Already exists\n" + "a" * 12 + ": Download complete\n"
    assert pull_progress(text) == "2 of 2 layers downloaded, 1 unpacked"
    assert pull_progress("1.0: Pulling from org/x\n") is None
