"""What stands in the way of a plain answer: damaged files, closed pipes, folders that cannot be made."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from pdserve import procfs
from pdserve.cli.console import Console
from pdserve.failure import start_error
from pdserve.protocol import Late
from pdserve.rundir import RunDir
from pdserve.state import DeploymentState
from tests.launch.deployment import pdserve, recipe, up
from tests.plan.kit import plan
from tests.plan.kit import recipe as planned_recipe

# Reports ------------------------------------------------------------------------------------------------------------


def late(*log_tail: str) -> Late:
    return Late(
        name="prefill-0",
        seconds=250.0,
        last_answer="nothing listens on port 8100",
        diagnostics="diagnostics/prefill-0-1.txt",
        log_tail=log_tail,
    )


def test_a_late_process_whose_log_tells_the_cause_is_explained(tmp_path: Path) -> None:
    tail = ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",)
    error = start_error(late(*tail), plan(planned_recipe()), RunDir(tmp_path))
    assert error.cause is not None
    assert "device ran out" in error.cause
    assert error.cause.endswith("last answer of its probe: nothing listens on port 8100")
    assert error.todo is not None
    assert "prefill.args" in error.todo
    assert str(tmp_path / "diagnostics/prefill-0-1.txt") in error.todo


def test_a_late_process_whose_log_tells_nothing_has_its_probe_as_the_cause(tmp_path: Path) -> None:
    error = start_error(late("thinking"), plan(planned_recipe()), RunDir(tmp_path))
    assert error.cause == "last answer of its probe: nothing listens on port 8100"
    assert error.todo is not None
    assert "timeouts.*" in error.todo


# A failure after which what is healthy is kept ----------------------------------------------------------------------

FAILED = {"at": 1.0, "event": "failed", "exit_code": 4, "error": "decode-0@here: it died\n  | [Errno 12] last line"}


def recorded(home: Path, name: str = "fake", *, launcher: int | None = None) -> RunDir:
    """A run of a deployment that says it is ready, served by the process of that PID (this one)."""
    run = RunDir.create(home, name, f"run-of-{name}")
    identity = procfs.identify(launcher or os.getpid())
    assert identity is not None
    state = DeploymentState(
        name=name,
        run_id=run.run_id,
        phase="ready",
        host=socket.gethostname(),
        launcher=identity,
        started_at=time.time(),
    )
    run.write(run.state, state.model_dump_json())
    run.write(run.plan, plan(planned_recipe()).model_dump_json())
    run.point_current()
    return run


def told(event: dict[str, object], run: RunDir, capsys: pytest.CaptureFixture[str]) -> str:
    """What the console prints of one event, after its head."""
    console = Console(plan(planned_recipe()))
    console.begin(run)
    capsys.readouterr()
    console.tell(event)
    return "".join(capsys.readouterr())


def test_a_kept_failure_is_shown_whole_with_what_to_do_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = told({**FAILED, "kept": True}, recorded(tmp_path), capsys)
    assert "error: decode-0@here: it died" in said
    assert "  | [Errno 12] last line" in said
    assert "pdserve down test" in said


def test_a_failure_that_ends_the_command_is_left_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(FAILED, recorded(tmp_path), capsys) == ""


def test_a_follower_leaves_a_kept_failure_to_its_own_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told({**FAILED, "kept": True}, recorded(tmp_path, launcher=1), capsys) == ""


def test_in_the_foreground_a_kept_failure_names_its_log(tmp_path: Path, pdserve_home: Path) -> None:
    dies = {"FAKE_DIE_AT": "load", "FAKE_EXIT_CODE": "7", "FAKE_LAST_LINES": "the very last words"}
    with up(recipe(tmp_path, decode__env=dies), pdserve_home, "--keep-on-failure") as deployment:
        deployment.command.expect("error: decode-0@")
        deployment.command.expect("| the very last words")
        deployment.command.expect("next: pdserve status fake")


def test_detached_a_kept_failure_is_said_once(tmp_path: Path, pdserve_home: Path) -> None:
    dies = {"FAKE_DIE_AT": "load", "FAKE_LAST_LINES": "the very last words"}
    code, output = pdserve("up", recipe(tmp_path, decode__env=dies), "--detach", "--keep-on-failure")
    assert pdserve("down")[0] == 0
    assert code == 4
    assert output.count("the very last words") == 1, output
