"""Whether a launcher lives, asked from a machine that cannot see its PID: by its sign of life in the shared folder."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from pdserve.operations.down import lateness
from pdserve.run.directory import RunDir, has_living_launcher, seconds_unheard
from pdserve.system import procfs
from pdserve.system.process import send
from tests.launch.deployment import pdserve, read_json, recipe, serving, until, up
from tests.launch.records import no_room, own_identity, recorded_state


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, "fake", "run-1")


HERE_GONE, FAR = recorded_state(), recorded_state(host="elsewhere")


def age_of(run: RunDir, seconds: float) -> None:
    """Make its sign of life so old."""
    at = run.beat.stat().st_mtime - seconds
    os.utime(run.beat, (at, at))


def test_on_its_own_machine_it_is_its_process(run: RunDir) -> None:
    assert has_living_launcher(run, recorded_state(launcher=own_identity()))
    run.write_beat()
    assert not has_living_launcher(run, HERE_GONE)


def test_on_another_machine_a_fresh_sign_of_life_counts_and_its_pid_means_nothing(run: RunDir) -> None:
    assert (has_living_launcher(run, FAR), seconds_unheard(run)) == (False, None)
    run.write_beat()
    assert (has_living_launcher(run, FAR), seconds_unheard(run)) == (True, None)
    age_of(run, 12)
    assert 12 <= (seconds_unheard(run) or 0) < 30
    assert has_living_launcher(run, FAR), "it is late"
    age_of(run, 19)
    assert not has_living_launcher(run, FAR)
    run.write_beat()
    run.remove_beat()
    assert not has_living_launcher(run, FAR)


def test_a_full_disk_takes_a_sign_of_life(run: RunDir) -> None:
    run.write_beat()
    age_of(run, 31)
    with no_room(0):
        run.write_beat()
    assert has_living_launcher(run, FAR)


@pytest.mark.process
def test_a_launcher_that_stands_still_is_shown_and_down_lets_it_go_on(tmp_path: Path, pdserve_home: Path) -> None:
    with up(recipe(tmp_path), pdserve_home) as deployment:
        launcher, run = serving(deployment).id_of("launcher"), deployment.run
        assert run.beat.exists()
        deployment.send_signal("launcher", signal.SIGSTOP)
        try:
            # At once: no sign of life has to be late for it.
            until(lambda: procfs.is_stopped(launcher))
            code, output = pdserve("status")
            shown = read_json(pdserve("status", "--json")[1])
            listed = pdserve("list")[1].split()
            stopped = pdserve("down")
        finally:
            send(launcher, signal.SIGCONT)
    assert code == 5
    assert f"launcher: PID {launcher.pid} on " in output
    assert f"kill -CONT {launcher.pid} lets it go on" in output
    assert (shown["phase"], shown["recorded_phase"], shown["launcher_stopped"]) == ("unresponsive", "ready", True)
    assert listed[:2] == ["fake", "unresponsive"]
    stood = f"fake: its launcher (PID {launcher.pid}) stood still (SIGSTOP) and got a SIGCONT"
    assert (stopped[0], stopped[1].splitlines()) == (0, [stood, "fake: stopped"])
    assert not run.beat.exists()


def test_down_waits_for_a_silent_launcher_as_long_as_it_can_count_as_living(run: RunDir) -> None:
    """Here that is as long as its process lives; elsewhere only its sign of life tells."""
    here = recorded_state(launcher=own_identity())
    run.write_beat()
    assert (lateness(run, here), lateness(run, FAR)) == (None, None)
    age_of(run, 12)
    assert "waiting up to 300 s for its answer" in (lateness(run, here) or "")
    assert "until it answers or was not heard for 30 s" in (lateness(run, FAR) or "")


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_that_is_wrong_makes_no_launcher_dead(run: RunDir, monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    run.write_beat()
    wrong = time.time() + hours * 3600
    monkeypatch.setattr(time, "time", lambda: wrong)
    assert has_living_launcher(run, FAR)
