"""The real stack: vLLM, Mooncake and LMCache on CPU, brought up by the command that users type."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from pdserve.system import procfs
from pdserve.system.procfs import ProcessId
from tests.launch.deployment import (
    REPOSITORY,
    Deployment,
    assert_nothing_left,
    home_in,
    pdserve,
    read_json,
    wait_until,
)
from tests.real.reached import SECONDS, Reached, reach


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home for run directories that the tests of one module share."""
    with home_in(tmp_path_factory.mktemp("real")) as folder:
        yield folder


@pytest.fixture(scope="session")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where files tell the engines that have loaded kv_faults what to do wrong."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture
def tiny(deployment: Deployment) -> Deployment:
    """The deployment of the module, once all of it serves: also what the test before has killed."""
    wait_until("all engines serve", lambda: deployment.state().phase == "ready", SECONDS, why=deployment.post_mortem)
    return deployment


@pytest.fixture
def reached(tiny: Deployment) -> AbstractAsyncContextManager[Reached]:
    """The deployment as clients reach it, opened for a test that is a coroutine."""
    return reach(tiny.run.read_plan(), tiny.run.read_key())


def brought_up(name: str, home: Path, settings: Mapping[str, object] | None = None) -> Iterator[Deployment]:
    """`pdserve up recipes/NAME.yaml --detach` with these `--set`, and `pdserve down` at the end; then nothing is
    left."""
    words = [word for key, value in (settings or {}).items() for word in ("--set", f"{key}={json.dumps(value)}")]
    code, output = pdserve("up", REPOSITORY / "recipes" / f"{name}.yaml", "--detach", *words)
    deployment = Deployment(None, home, name)
    try:
        assert code == 0, output
        yield deployment
    finally:
        pdserve("down", name)
    assert_nothing_left(deployment)


def proofs_of_verify() -> tuple[int, dict[str, Any], str]:
    """Exit code, proofs by name and output of `pdserve verify`."""
    code, output = pdserve("verify", "--json")
    report, _ = json.JSONDecoder().raw_decode(output[output.index("{") :])
    return code, {proof["name"]: proof for proof in report["proofs"]}, output


def assert_proven(*names: str) -> None:
    """`pdserve verify` proves these, and tries no others."""
    code, proofs, output = proofs_of_verify()
    assert code == 0, output
    assert {name: proof["status"] for name, proof in proofs.items()} == dict.fromkeys(names, "proven"), output


def effects(process: str, patch: str) -> dict[str, float]:
    """What a patch in a process has done, by its own count, which is written once a second."""
    status = read_json(pdserve("status", "--json")[1])
    counted: dict[str, float] = status["processes"][process]["patch_effects"].get(patch, {})
    return counted


def status_of_all() -> tuple[int, Any]:
    """Exit code and JSON of `pdserve status`, once every engine and cache has answered it: on a busy machine one may
    take longer than `status` waits."""
    until = time.monotonic() + SECONDS
    while True:
        code, output = pdserve("status", "--json")
        status = read_json(output)
        seen = [process[kind] for process in status["processes"].values() for kind in ("engine", "lmcache")]
        if not (silent := [record for record in seen if record is not None and record["error"] is not None]):
            return code, status
        assert time.monotonic() < until, silent


def member(tiny: Deployment, name: str, title: str) -> ProcessId:
    """A process inside an engine, by what vLLM calls it."""
    root = tiny.id_of(name)
    pids = [pid for pid in procfs.descendants(root.pid) if procfs.process_title(pid).startswith(title)]
    assert len(pids) == 1, pids
    identity = procfs.identify(pids[0])
    assert identity is not None
    return identity
