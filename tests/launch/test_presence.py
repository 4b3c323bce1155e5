"""Whether a launcher lives, asked from a machine that cannot see its PID: by its sign of life in the shared folder."""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from pathlib import Path

import pytest

from pdserve.operations.down import lateness
from pdserve.run.directory import RunDir, lives, unheard
from pdserve.run.state import DeploymentState
from pdserve.system import procfs
from pdserve.system.process import new_token, send
from pdserve.system.procfs import ProcessId
from tests.launch.deployment import pdserve, read_json, recipe, until, up


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, "fake", "run-1")


def state(host: str, launcher: ProcessId) -> DeploymentState:
    return DeploymentState(token=new_token(), name="fake", run_id="run-1", host=host, launcher=launcher, started_at=0.0)


GONE = ProcessId(pid=2**22, start_ticks=1)


def test_on_its_own_machine_it_is_its_process(run: RunDir) -> None:
    own = procfs.identify(os.getpid())
    assert own is not None
    assert lives(run, state(os.uname().nodename, own))
    run.write_beat()
    assert not lives(run, state(os.uname().nodename, GONE))


def test_on_another_machine_a_fresh_sign_of_life_counts_and_its_pid_means_nothing(run: RunDir) -> None:
    assert not lives(run, state("elsewhere", GONE))
    run.write_beat()
    assert lives(run, state("elsewhere", GONE))
    run.remove_beat()
    assert not lives(run, state("elsewhere", GONE))


def test_an_old_sign_of_life_counts_for_nothing(run: RunDir) -> None:
    run.write_beat()
    at = run.beat.stat().st_mtime - 31
    os.utime(run.beat, (at, at))
    assert not lives(run, state("elsewhere", GONE))


def test_a_full_disk_takes_a_sign_of_life(run: RunDir) -> None:
    run.write_beat()
    at = run.beat.stat().st_mtime - 31
    os.utime(run.beat, (at, at))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # no file can be written, as where there is no room
    try:
        run.write_beat()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert lives(run, state("elsewhere", GONE))


def test_a_late_sign_of_life_is_distinguished_from_none(run: RunDir) -> None:
    assert unheard(run) is None
    run.write_beat()
    assert unheard(run) is None
    at = run.beat.stat().st_mtime - 12
    os.utime(run.beat, (at, at))
    assert 12 <= (unheard(run) or 0) < 30
    assert lives(run, state("elsewhere", GONE))


@pytest.mark.process
def test_a_launcher_that_stands_still_is_not_shown_as_ready(tmp_path: Path, pdserve_home: Path) -> None:
    with up(recipe(tmp_path), pdserve_home) as deployment:
        deployment.command.expect("serving fake at")
        launcher = deployment.id_of("launcher")
        deployment.send_signal("launcher", signal.SIGSTOP)
        try:
            # At once: no sign of life has to be late for it.
            until(lambda: procfs.is_stopped(launcher))
            code, output = pdserve("status")
            shown = read_json(pdserve("status", "--json")[1])
            listed = pdserve("list")[1].split()
        finally:
            deployment.send_signal("launcher", signal.SIGCONT)
        assert code == 5
        assert re.match(
            r"fake: unresponsive; it was ready when its launcher was last heard, \d+ s ago\n"
            rf"launcher: PID {launcher.pid} on \S+ stands still \(SIGSTOP, Ctrl-Z or a debugger\), and nothing watches "
            rf"the deployment; kill -CONT {launcher.pid} lets it go on, pdserve down fake ends it\n",
            output,
        ), output
        assert (shown["phase"], shown["recorded_phase"], shown["launcher_stopped"]) == ("unresponsive", "ready", True)
        assert listed[:2] == ["fake", "unresponsive"]
        until(lambda: pdserve("list")[1].split()[1] == "ready")


@pytest.mark.process
def test_down_lets_a_launcher_go_on_that_stands_still(tmp_path: Path, pdserve_home: Path) -> None:
    with up(recipe(tmp_path), pdserve_home) as deployment:
        deployment.command.expect("serving fake at")
        launcher = deployment.id_of("launcher")
        deployment.send_signal("launcher", signal.SIGSTOP)
        try:
            until(lambda: procfs.is_stopped(launcher))
            code, output = pdserve("down")
        finally:
            send(launcher, signal.SIGCONT)
        stood = f"fake: its launcher (PID {launcher.pid}) stood still (SIGSTOP) and got a SIGCONT"
        assert (code, output.splitlines()) == (0, [stood, "fake: stopped"])


def test_down_waits_for_a_silent_launcher_as_long_as_it_can_count_as_living(run: RunDir) -> None:
    """Here that is as long as its process lives; elsewhere only its sign of life tells."""
    own = procfs.identify(os.getpid())
    assert own is not None
    here, remote = state(os.uname().nodename, own), state("elsewhere", GONE)
    run.write_beat()
    assert (lateness(run, here), lateness(run, remote)) == (None, None)
    at = run.beat.stat().st_mtime - 12
    os.utime(run.beat, (at, at))
    silent = r"was not heard for 1\d s; waiting"
    assert re.fullmatch(
        rf"its launcher \(PID {own.pid}\) {silent} up to 300 s for its answer", lateness(run, here) or ""
    )
    assert re.fullmatch(
        rf"its launcher on elsewhere {silent} for it, until it answers or was not heard for 30 s",
        lateness(run, remote) or "",
    )


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_that_is_wrong_makes_no_launcher_dead(run: RunDir, monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    run.write_beat()
    wrong = time.time() + hours * 3600
    monkeypatch.setattr(time, "time", lambda: wrong)
    assert lives(run, state("elsewhere", GONE))


@pytest.mark.process
def test_a_launcher_gives_a_sign_of_life_and_removes_it(tmp_path: Path, pdserve_home: Path) -> None:
    with up(recipe(tmp_path), pdserve_home) as deployment:
        deployment.command.expect("serving fake at")
        assert deployment.run.beat.exists()
        run = deployment.run
    assert not run.beat.exists()
