"""The engine key lies outside the run directory for as long as its run lasts, and not longer."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.run.directory import RunDir
from pdserve.system.process import pid_end
from tests.launch.deployment import LINE_SECONDS, Deployment, assert_nothing_left, pdserve, recipe, serving, until, up
from tests.strikes import strike

pytestmark = pytest.mark.process


def keys() -> list[str]:
    return sorted(file.name for file in Path(os.environ["XDG_RUNTIME_DIR"]).glob("pdserve-*.key"))


@pytest.mark.parametrize("options", [(), ("--detach",)], ids=["foreground", "detached"])
def test_an_up_that_finds_another_launcher_leaves_none(
    tmp_path: Path, pdserve_home: Path, options: tuple[str, ...]
) -> None:
    other = RunDir.create(pdserve_home, "fake", "run-of-another")
    with other.only_launcher():
        code, output = pdserve("up", recipe(tmp_path), *options)
    assert code == 8, output
    assert "fake is being started or served by another pdserve up" in output
    assert f"PID {os.getpid()} (" in output
    assert keys() == []


@pytest.mark.full
def test_output_of_a_detached_launcher_from_before_its_history_is_shown_here(
    tmp_path: Path, pdserve_home: Path
) -> None:
    """The lock was free when `up` looked, and no longer when its launcher did."""
    script = (
        "from pdserve.cli import main\nfrom pdserve.operations import up\n"
        "up.check_no_launcher = lambda root, name: None\nmain.main()"
    )
    argv = [sys.executable, "-c", script, "up", str(recipe(tmp_path)), "--detach"]
    with RunDir.create(pdserve_home, "fake", "run-of-another").only_launcher():
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=LINE_SECONDS)
    assert done.returncode == 4, done.stdout
    assert "by another pdserve up" in done.stderr
    assert f"PID {os.getpid()} (" in done.stderr
    assert keys() == []


def test_a_run_keeps_its_own_until_it_is_over(tmp_path: Path, pdserve_home: Path) -> None:
    file = recipe(tmp_path)
    with up(file, pdserve_home) as deployment:
        own = serving(deployment).run.key_file.name
        assert pdserve("up", file)[1].endswith("already up")
        assert keys() == [own]
        deployment.run.key_file.unlink()
        until(deployment.run.key_file.exists)
        assert pdserve("down") == (0, "fake: stopped")
    assert keys() == []


def killed(deployment: Deployment) -> str:
    """Kills the launcher, as the kernel does when memory is short; the key that it could not take along."""
    own = serving(deployment).run.key_file.name
    deployment.send_signal("launcher", signal.SIGKILL)
    deployment.command.finish()
    asyncio.run(asyncio.wait_for(pid_end(deployment.id_of("guard").pid), LINE_SECONDS))
    assert keys() == [own]
    return own


def test_down_takes_that_of_a_killed_launcher_away(tmp_path: Path, pdserve_home: Path) -> None:
    with up(recipe(tmp_path), pdserve_home) as deployment:
        killed(deployment)
        assert pdserve("down") == (0, "fake: not running")
        assert keys() == []


def test_so_does_the_next_up(tmp_path: Path, pdserve_home: Path) -> None:
    with up(recipe(tmp_path), pdserve_home) as deployment:
        before = killed(deployment)
    with up(recipe(tmp_path), pdserve_home) as deployment:
        own = serving(deployment).run.key_file.name
        assert own != before
        assert keys() == [own]
    assert_nothing_left(deployment)


STRIKES = """
import os, signal
from pdserve.cli import main
from pdserve.operations import up
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background command has it ignored
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # so has nohup
before = up.{function}
def struck(*arguments, **options):
    made = before(*arguments, **options) if {late} else None
    os.kill(os.getpid(), signal.{signum})
    return made or before(*arguments, **options)
up.{function} = struck
main.main()
"""
"""`pdserve` that is signalled in the middle of its own `up`, where no other process could hit it reliably."""


NEVER_DONE_IMPORTING = """
import signal, sys
if "pdserve.operations.launcher_process" in sys.orig_argv:
    while True:
        signal.pause()
"""


def struck(function: str, signum: str, file: Path, *options: str, late: bool = False) -> int:
    """The exit code of an `up` that gets the signal as it begins this function, or `late`: has done what it does."""
    script = STRIKES.format(function=function, signum=signum, late=late)
    argv = [sys.executable, "-c", script, "up", str(file), *options]
    return subprocess.run(argv, stdin=subprocess.DEVNULL, timeout=LINE_SECONDS, check=False).returncode


@pytest.mark.parametrize("options", [(), ("--detach",)], ids=["foreground", "detached"])
@pytest.mark.parametrize("signum", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.full
def test_an_up_that_is_interrupted_before_its_launcher_runs_leaves_none(
    tmp_path: Path, pdserve_home: Path, signum: str, options: tuple[str, ...]
) -> None:
    function = "start_detached" if options else "run_here"
    assert struck(function, signum, recipe(tmp_path), *options) == 130
    assert keys() == []


@pytest.mark.parametrize(("function", "late"), [("start_detached", True), ("follow", False)], ids=["begun", "followed"])
@pytest.mark.parametrize("signum", ["SIGINT", "SIGTERM"])
@pytest.mark.full
def test_neither_does_one_whose_launcher_is_still_importing(
    tmp_path: Path, pdserve_home: Path, signum: str, function: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    strike(tmp_path / "site", NEVER_DONE_IMPORTING, monkeypatch)
    assert struck(function, signum, recipe(tmp_path), "--detach", late=late) == 130
    assert keys() == []
    assert list(pdserve_home.glob("*/*")) == [], "no folder of a run that never began"


STRIKES_TWICE = """
import os, signal
from pdserve.cli import main
from pdserve.operations import up
signal.signal(signal.SIGINT, signal.default_int_handler)
def struck(before):
    def strikes(*arguments, **options):
        os.kill(os.getpid(), signal.SIGINT)
        return before(*arguments, **options)
    return strikes
up.follow, up.discard = struck(up.follow), struck(up.discard)
main.main()
"""


@pytest.mark.full
def test_a_second_ctrl_c_as_it_clears_up_leaves_nothing_either(
    tmp_path: Path, pdserve_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strike(tmp_path / "site", NEVER_DONE_IMPORTING, monkeypatch)
    argv = [sys.executable, "-c", STRIKES_TWICE, "up", str(recipe(tmp_path)), "--detach"]
    assert subprocess.run(argv, stdin=subprocess.DEVNULL, timeout=LINE_SECONDS, check=False).returncode == 130
    assert keys() == []
    assert list(pdserve_home.glob("*/*")) == []


def test_a_failure_that_is_kept_keeps_its_own_until_down(tmp_path: Path, pdserve_home: Path) -> None:
    file = recipe(tmp_path, decode__env={"FAKE_DIE_AT": "load"})
    assert pdserve("up", file, "--detach", "--keep-on-failure")[0] == 4
    assert len(keys()) == 1
    assert pdserve("down")[0] == 0
    assert keys() == []
