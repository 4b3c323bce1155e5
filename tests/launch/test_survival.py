"""Supervision survives what happens to itself: deleted records, closed terminals, several deaths at once."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pdserve.system import cgroup, procfs
from pdserve.system.process import send
from tests.launch.deployment import (
    BODY,
    LINE_SECONDS,
    Command,
    Deployment,
    assert_nothing_left,
    pdserve,
    read_json,
    recipe,
    serving,
    until,
    up,
)
from tests.launch.test_serving_faults import RESTART, TWO

pytestmark = pytest.mark.process


def test_a_deployment_whose_record_was_deleted_is_still_found_and_stopped(tmp_path: Path, pdserve_home: Path) -> None:
    with up(recipe(tmp_path), pdserve_home) as deployment:
        run = serving(deployment).run
        delete(pdserve_home)
        deployment.command.expect("fake: its record was deleted at")
        code, output = pdserve("status")
        assert code == 0, output
        assert "fake: ready (its record was deleted at" in output
        assert run.path.stat().st_mode & 0o077 == 0
        assert pdserve("restart", "proxy") == (0, "proxy is ready")
        assert pdserve("logs", "proxy")[0] == 0
        assert pdserve("up")[1].endswith("already up")
        assert pdserve("down") == (0, "fake: stopped")
        assert deployment.command.finish() == 0


def delete(folder: Path) -> None:
    """At once: the launcher may write meanwhile, and then rmtree does not get to its end on a busy machine."""
    shutil.rmtree(folder.rename(folder.with_name("deleted")))


@contextmanager
def ignored(*signums: signal.Signals) -> Iterator[None]:
    """What is started meanwhile ignores these from its first moment."""
    before = {signum: signal.signal(signum, signal.SIG_IGN) for signum in signums}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def test_what_a_terminal_sends_stops_nothing_where_it_is_ignored(tmp_path: Path, pdserve_home: Path) -> None:
    """As below nohup, and as a script's background command."""
    of_terminal = (signal.SIGHUP, signal.SIGINT)
    with ignored(*of_terminal), up(recipe(tmp_path), pdserve_home) as deployment:
        try:
            serving(deployment)
            for signum in of_terminal:
                deployment.command.popen.send_signal(signum)
            # A launcher hears a signal before the next request to it, and one that stops refuses this one.
            assert pdserve("restart", "proxy") == (0, "proxy is ready")
            assert deployment.post("/v1/completions", BODY)[0] == 200
        finally:
            deployment.command.popen.send_signal(signal.SIGTERM)
        assert deployment.command.finish() == 0, deployment.command.output
    assert_nothing_left(deployment)


def test_a_closed_terminal_does_not_end_supervision(tmp_path: Path, pdserve_home: Path) -> None:
    """`pdserve up | head`: the reader leaves, the deployment is watched on."""
    command = Command("up", recipe(tmp_path, decode__restart=RESTART))
    deployment = Deployment(command, pdserve_home)
    try:
        command.expect("serving fake at")
        command.stop_reading()
        before = deployment.id_of("decode-0")
        deployment.send_signal("decode-0", signal.SIGKILL)
        deployment.wait_for("phase", phase="ready", after="degraded")
        assert deployment.id_of("decode-0") != before
        assert deployment.post("/v1/completions", BODY)[0] == 200
    finally:
        command.interrupt()
        command.popen.wait(LINE_SECONDS)
    assert_nothing_left(deployment)


def kill_all(deployment: Deployment) -> None:
    """All supervisors and the roots of all processes, before one of them can act on the death of another one."""
    for name in ("agent", "launcher"):
        deployment.send_signal(name, signal.SIGSTOP)
    for name in ("launcher", "guard", "agent", "proxy", "decode-0", "prefill-0", "lmcache-0"):
        deployment.send_signal(name, signal.SIGKILL)
    deployment.command.finish()


def test_members_whose_roots_and_supervisors_were_all_killed_are_found_by_down_and_up(
    tmp_path: Path, pdserve_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the token in their environment."""
    monkeypatch.setenv(cgroup.SWITCH, "off")
    file = recipe(tmp_path, prefill__env={"FAKE_IGNORE_TERM": "1", "FAKE_CHILD": "setsid"}, timeouts__stop_seconds=1)
    with up(file, pdserve_home) as deployment:
        serving(deployment)
        kill_all(deployment)
        code, output = pdserve("up", file, "--detach")
        assert (code, "of the last run of fake still live" in output) == (8, True), output
        code, output = pdserve("down")
        assert (code, "stopped" in output) == (0, True), output
        assert_nothing_left(deployment)


@pytest.mark.parametrize(("switch", "killed"), [("off", False), ("on", True)], ids=["off", "on, all killed"])
def test_who_copies_the_environment_of_an_engine_is_no_part_of_it(
    tmp_path: Path, pdserve_home: Path, monkeypatch: pytest.MonkeyPatch, switch: str, killed: bool
) -> None:
    """For an experiment by hand, in a session that is younger than the deployment."""
    monkeypatch.setenv(cgroup.SWITCH, switch)
    with up(recipe(tmp_path), pdserve_home) as deployment:
        engine = serving(deployment).id_of("prefill-0")
        (node,) = deployment.state().nodes.values()
        if killed and node.cgroup is None:
            pytest.skip(f"no cgroup can be made: {node.no_cgroup}")
        copied = dict(each.split(b"=", 1) for each in procfs.environment(engine.pid) if each)
        shell = "import subprocess, sys; subprocess.run(['sleep', '600'])"
        with subprocess.Popen([sys.executable, "-c", shell], env=copied, start_new_session=True) as stranger:
            until(lambda: procfs.descendants(stranger.pid) != set())
            (experiment,) = procfs.identities(procfs.descendants(stranger.pid))
            try:
                if killed:
                    kill_all(deployment)
                code, output = pdserve("down")
                assert code == 0, output
                assert (stranger.poll() is None, experiment.alive()) == (True, True)
                assert_nothing_left(deployment)
            finally:
                for process in (experiment, procfs.identify(stranger.pid)):
                    assert process is None or send(process, signal.SIGKILL) or not process.alive()
                until(lambda: not experiment.alive())


def test_down_lets_supervisors_go_on_that_stand_still(tmp_path: Path, pdserve_home: Path) -> None:
    held = ("agent", "guard")
    with up(recipe(tmp_path), pdserve_home) as deployment:
        serving(deployment)
        for name in held:
            deployment.send_signal(name, signal.SIGSTOP)
        code, output = pdserve("down")
        assert code == 0, output
        for name in held:
            pid = deployment.id_of(name).pid
            assert re.search(rf"fake: stopped; .*{name}@\S+ \(PID {pid}\) was stopped \(SIGSTOP\); sent", output)
        assert deployment.command.finish() == 0, deployment.command.output
        # They did their own work, and nobody waited for them in vain.
        assert set(deployment.stopped()) >= {"proxy", "decode-0", "prefill-0"}
        assert deployment.events("down")[-1]["clean"]
        assert_nothing_left(deployment)


def test_up_waits_for_what_the_agents_of_a_lost_launcher_stop(tmp_path: Path, pdserve_home: Path) -> None:
    """They have the ports until then."""
    file = recipe(tmp_path, prefill__env={"FAKE_IGNORE_TERM": "1"}, timeouts__stop_seconds=5)
    with up(file, pdserve_home) as deployment:
        serving(deployment).send_signal("launcher", signal.SIGKILL)
        deployment.command.finish()
        assert deployment.id_of("prefill-0").alive()
        with up(file, pdserve_home) as again:
            serving(again)
            assert "waiting until its agents have stopped what it left" in again.command.output


@pytest.mark.parametrize("victims", [("guard", "agent"), ("launcher", "guard", "agent")], ids="+".join)
def test_when_every_supervisor_is_killed_at_once(tmp_path: Path, pdserve_home: Path, victims: tuple[str, ...]) -> None:
    """Nobody is left to clear up, but the launcher, or the next `down`, has the record."""
    stubborn = {"FAKE_IGNORE_TERM": "1", "FAKE_CHILD": "setsid", "FAKE_SHM": "leak"}
    with up(recipe(tmp_path, prefill__env=stubborn, timeouts__stop_seconds=1), pdserve_home) as deployment:
        serving(deployment)
        # The agent would act on its guard's death, and the launcher on the agent's, before the next one is killed.
        for name in ("agent", "launcher"):
            if name in victims:
                deployment.send_signal(name, signal.SIGSTOP)
        for name in victims:
            deployment.send_signal(name, signal.SIGKILL)
        deployment.command.finish()
        if "launcher" in victims:
            code, output = pdserve("down")
            assert (code, "stopped" in output) == (0, True), output
        assert_nothing_left(deployment)


def test_up_during_a_back_off_starts_a_process_once(tmp_path: Path, pdserve_home: Path) -> None:
    slow = {**RESTART, "backoff_seconds": 300.0, "backoff_max_seconds": 300.0}
    file = recipe(tmp_path, decode__restart=slow, **TWO)
    with up(file, pdserve_home) as deployment:
        serving(deployment).send_signal("decode-1", signal.SIGKILL)
        deployment.command.expect("decode-1     restart 1 in 300 s")
        assert pdserve("up", file, "--set", "decode.args.max-num-seqs=3")[0] == 8
        assert deployment.started().count("decode-1") == 1
        code, output = pdserve("up", file)
        assert code == 0, output
        assert deployment.started().count("decode-1") == 2
        assert read_json(pdserve("status", "--json")[1])["phase"] == "ready"


def test_a_restart_of_the_last_of_a_role_that_fails_ends_the_deployment(tmp_path: Path, pdserve_home: Path) -> None:
    broken = tmp_path / "broken"
    with up(recipe(tmp_path, decode__env={"FAKE_DIE_IF": str(broken)}), pdserve_home) as deployment:
        serving(deployment)
        broken.touch()
        assert pdserve("restart", "decode-0")[0] != 0
        assert deployment.command.finish() == 5
        assert_nothing_left(deployment)
