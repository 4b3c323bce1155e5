"""The master of a Mooncake store is started, watched, and restarted or fatal as the recipe says."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.launch.deployment import REPOSITORY, Deployment, assert_nothing_left, free_ports, pdserve, recipe, up

pytestmark = pytest.mark.process

MASTER = [sys.executable, str(REPOSITORY / "tests/fakes/mooncake_master.py")]
BODY = {"model": "fake", "prompt": "one two three", "max_tokens": 2}
NAME = "mooncake-master"


def with_store(folder: Path, **section: Any) -> Path:
    """1P1D over fakes with a store in LMCache's place."""
    # Blocks after those that `recipe` takes.
    rpc, http = free_ports(11)[-2:]
    multi = {"kind": "multi", "of": [{"kind": "mooncake", "protocol": "tcp"}, {"kind": "mooncake-store"}]}
    return recipe(
        folder,
        lmcache=None,
        prefill__connector=multi,
        mooncake_store={"segment_gib": 0.01, "buffer_gib": 0.01, "protocol": "tcp", "command": MASTER, **section},
        ports__mooncake_master=rpc,
        ports__mooncake_master_http=http,
    )


def serving(deployment: Deployment) -> Deployment:
    deployment.command.expect("serving fake at")
    return deployment


@contextmanager
def with_pool(folder: Path, home: Path, size: str) -> Iterator[tuple[Deployment, Path]]:
    """One that serves, and the file that has what its master reports as the bytes of its pool."""
    pool = folder / "pool"
    pool.write_text(size)
    with up(with_store(folder, command=[*MASTER, f"-fake_pool={pool}"]), home) as deployment:
        yield serving(deployment), pool


def test_it_is_ready_before_the_engines_start_and_ends_after_them(tmp_path: Path, pdserve_home: Path) -> None:
    with up(with_store(tmp_path), pdserve_home) as deployment:
        serving(deployment)
        assert deployment.started()[0] == NAME
        assert deployment.post("/v1/completions", BODY)[0] == 200
        deployment.command.interrupt()
        assert deployment.command.finish() == 0
        assert [event["name"] for event in deployment.events("stopped")][-1] == NAME
        assert_nothing_left(deployment)


@pytest.mark.full
def test_it_is_ready_again_only_once_its_engines_have_given_it_memory(tmp_path: Path, pdserve_home: Path) -> None:
    with with_pool(tmp_path, pdserve_home, "1048576") as (deployment, pool):
        pool.write_text("0")
        deployment.send_signal(NAME, signal.SIGKILL)
        deployment.command.expect(f"{NAME} restart 1")
        deployment.command.expect(f"{NAME} ready after")
        assert deployment.post("/v1/completions", BODY)[0] == 200
        state = deployment.state()
        assert (state.phase, state.processes[NAME].phase) == ("degraded", "degraded")
        assert "without the memory of its engines" in state.processes[NAME].note
        pool.write_text("1048576")
        deployment.command.expect("deployment is ready")


@pytest.mark.full
def test_one_that_dies_while_it_has_no_memory_is_restarted_again(tmp_path: Path, pdserve_home: Path) -> None:
    with with_pool(tmp_path, pdserve_home, "1048576") as (deployment, pool):
        pool.write_text("0")
        for number in (1, 2):
            deployment.send_signal(NAME, signal.SIGKILL)
            deployment.command.expect(f"{NAME} restart {number}")
            deployment.command.expect(f"{NAME} ready after")
        pool.write_text("1048576")
        deployment.command.expect("deployment is ready")
        assert [event["mounted"] for event in deployment.events("pool")][-1] is True


@pytest.mark.full
def test_one_whose_figures_cannot_be_read_is_ready(tmp_path: Path, pdserve_home: Path) -> None:
    with with_pool(tmp_path, pdserve_home, "<html>") as (deployment, _):
        deployment.send_signal(NAME, signal.SIGKILL)
        deployment.command.expect("deployment is degraded")
        deployment.command.expect("deployment is ready")


@pytest.mark.full
def test_a_restart_that_was_asked_for_ends_once_it_has_memory(tmp_path: Path, pdserve_home: Path) -> None:
    with up(with_store(tmp_path), pdserve_home) as deployment:
        serving(deployment)
        assert pdserve("restart", NAME) == (0, f"{NAME} is ready")


def test_it_is_restarted_on_its_ports_and_its_engines_serve_on(tmp_path: Path, pdserve_home: Path) -> None:
    with up(with_store(tmp_path), pdserve_home) as deployment:
        before = serving(deployment).id_of(NAME)
        deployment.send_signal(NAME, signal.SIGKILL)
        deployment.command.expect("deployment is degraded")
        assert deployment.post("/v1/completions", BODY)[0] == 200
        deployment.command.expect("deployment is ready")
        assert deployment.id_of(NAME) != before
        assert [event["routing"] for event in deployment.events("route") if event["name"] == "prefill-0"] == ["ready"]


@pytest.mark.full
def test_its_death_may_end_the_deployment(tmp_path: Path, pdserve_home: Path) -> None:
    with up(with_store(tmp_path, on_death="fail"), pdserve_home) as deployment:
        serving(deployment).send_signal(NAME, signal.SIGKILL)
        assert deployment.command.finish() == 5, deployment.command.output
        assert f"{NAME}@" in deployment.command.output
        assert_nothing_left(deployment)


def test_a_flag_that_it_does_not_know_ends_the_start_and_names_the_key(tmp_path: Path, pdserve_home: Path) -> None:
    with up(with_store(tmp_path, extra_args={"no_such_flag": 1}), pdserve_home) as deployment:
        assert deployment.command.finish() == 4, deployment.command.output
        assert "mooncake_store.extra_args" in deployment.command.output
        assert "prefill-0" not in deployment.started()
