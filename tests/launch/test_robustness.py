"""What stands in the way of a plain answer: damaged files, closed pipes, folders that cannot be made."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pdserve.errors import StateError
from pdserve.launch.failure import start_error
from pdserve.operations.progress import ShownProgress
from pdserve.reach.protocol import Died, Late
from pdserve.run.directory import RunDir, find
from pdserve.run.state import NodeState, ProcessState
from pdserve.system.procfs import ProcessId
from tests.launch.deployment import PDSERVE, REPOSITORY, execute, pdserve, recipe
from tests.launch.records import HERE, own_identity, recorded_state, write_record
from tests.plan.kit import plan
from tests.plan.kit import recipe as planned_recipe
from tests.tables import each_row

# Reports ------------------------------------------------------------------------------------------------------------


def late(log_tail: str, diagnostics: str | None = "diagnostics/prefill-0-1.txt") -> Late:
    answer = "nothing listens on port 8100"
    return Late(name="prefill-0", seconds=250.0, last_answer=answer, diagnostics=diagnostics, log_tail=(log_tail,))


def test_a_late_process_with_the_cause_in_its_log_is_explained(tmp_path: Path) -> None:
    tail = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    error = start_error(late(tail), plan(planned_recipe()), RunDir(tmp_path))
    assert "device ran out" in str(error.cause)
    assert str(error.cause).endswith("last answer of its probe: nothing listens on port 8100")
    assert "prefill.args" in str(error.todo)
    assert str(tmp_path / "diagnostics/prefill-0-1.txt") in str(error.todo)


def test_a_late_process_without_a_cause_in_its_log_has_its_probe_as_the_cause(tmp_path: Path) -> None:
    error = start_error(late("thinking", diagnostics=None), plan(planned_recipe()), RunDir(tmp_path))
    assert error.cause == "last answer of its probe: nothing listens on port 8100"
    assert "timeouts.*" in str(error.todo)
    assert str(error.todo).endswith(f"could not be saved in {tmp_path / 'diagnostics'}"), "it names no file"


def test_of_a_process_that_the_kernel_killed_for_memory_no_log_line_is_taken_for_the_cause(tmp_path: Path) -> None:
    died = Died(
        name="decode-0",
        pid=7,
        code=-signal.SIGKILL,
        how="killed by the kernel for memory (limit 4.0 GiB, peak 4.0 GiB)",
        seconds=3,
        while_starting=True,
        out_of_memory=True,
        log_tail=("OSError: [Errno 98] Address already in use",),
    )
    error = start_error(died, plan(planned_recipe()), RunDir(tmp_path))
    assert error.cause == "it needed more memory than was left, by the kernel's own count for its cgroup"
    assert "raise the limit" in str(error.todo)


# A failure after which what is healthy is kept ----------------------------------------------------------------------

FAILED = {"at": 1.0, "event": "failed", "exit_code": 4, "error": "decode-0@here: it died\n  | [Errno 12] last line"}


def recorded(
    home: Path, name: str = "fake", *, launcher: int | None = None, prefill: ProcessId | None = None
) -> RunDir:
    """A run of a deployment that says it is ready, served by the process of that PID (this one)."""
    identity = own_identity() if launcher is None else ProcessId(pid=launcher, start_ticks=1)
    state = recorded_state(
        name=name,
        run_id=f"run-of-{name}",
        phase="ready",
        launcher=identity,
        nodes={"localhost": NodeState(agent=identity, guard=identity, hostname=HERE)},
        processes={"prefill-0": ProcessState(role="prefill", node="localhost", phase="ready", id=prefill)},
        started_at=time.time(),
    )
    return write_record(RunDir.create(home, name, state.run_id), state, plan(planned_recipe()))


def printed(
    event: dict[str, object], run: RunDir, capsys: pytest.CaptureFixture[str], *, serves_here: bool = True
) -> str:
    """What the console prints of one event, after its head."""
    console = ShownProgress()
    console.begin(run, plan(planned_recipe()), serves_here=serves_here)
    capsys.readouterr()
    console.event(event)
    return "".join(capsys.readouterr())


def test_a_kept_failure_is_shown_whole_with_what_to_do_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed({**FAILED, "kept": True}, recorded(tmp_path), capsys)
    assert "error: decode-0@here: it died" in text
    assert "  | [Errno 12] last line" in text
    assert "pdserve down test" in text


def test_progress_that_a_full_disk_does_not_take_is_told_once_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = recorded(tmp_path)
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        console = ShownProgress()
        console.begin(run, plan(planned_recipe()), serves_here=True)
        console.event({**FAILED, "kept": True})
        console.result("done")
        console.end(detached=True)
    error = capsys.readouterr().err
    assert error.count("stdout: the progress cannot be written: No space left on device") == 1
    assert "pdserve status" in error
    assert f"{run.events} the history" in error
    assert "error: decode-0@here: it died" in error


def test_a_failure_that_ends_the_command_is_named_at_once_and_reported_at_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The teardown in between may take a minute."""
    assert printed(FAILED, recorded(tmp_path), capsys).endswith("] failed: decode-0@here: it died\n")


def test_a_follower_leaves_a_kept_failure_to_its_own_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed({**FAILED, "kept": True}, recorded(tmp_path), capsys, serves_here=False) == ""


# Folders and files that are not what they should be ------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize("variable", ["PDSERVE_HOME", "XDG_RUNTIME_DIR"])
def test_a_folder_that_cannot_be_made_is_named_and_nothing_starts(
    tmp_path: Path, pdserve_home: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(variable, str(tmp_path / "file" / "folder"))
    code, output = pdserve("up", recipe(tmp_path))
    assert code == 8, output
    assert str(tmp_path / "file" / "folder") in output
    assert f"set {variable}" in output
    assert "Traceback" not in output


@each_row("file", ["state.json", "plan.json"])
@each_row("content", [b"", b"\xff\x00{", b'{"schema_version": 1, "name": "fake"}'])
def test_a_damaged_record_is_named(tmp_path: Path, file: str, content: bytes) -> None:
    run = recorded(tmp_path)
    (run.path / file).write_bytes(content)
    read = run.read_state if file == "state.json" else run.read_plan
    with pytest.raises(StateError, match=f"this {file} is damaged") as raised:
        read()
    assert raised.value.where == str(run.path / file)


@each_row("file", ["state.json", "plan.json"])
@each_row("number", [None, 0, 2, "1"])
def test_a_record_of_another_version_is_refused_whatever_it_has(tmp_path: Path, file: str, number: object) -> None:
    run = recorded(tmp_path)
    record = json.loads((run.path / file).read_text()) | {"schema_version": number, "of_that_version": 1}
    if number is None:
        del record["schema_version"], record["of_that_version"]
    (run.path / file).write_text(json.dumps(record))
    read = run.read_state if file == "state.json" else run.read_plan
    with pytest.raises(StateError, match=f"this {file} was written by another version of pdserve") as raised:
        read()
    assert raised.value.where == str(run.path / file)
    assert raised.value.todo == "take it down with that one"


@pytest.mark.process
def test_one_damaged_record_is_named_and_does_not_hide_the_others(pdserve_home: Path) -> None:
    broken = recorded(pdserve_home, "broken").state
    broken.write_bytes(b"{")
    healthy = recorded(pdserve_home, "healthy")
    for command in ("status", "down"):
        code, output = pdserve(command, "broken")
        assert (code, output.startswith(f"error: {broken}: ")) == (8, True), output
    code, output = pdserve("list", "--json")
    assert code == 0, output
    assert {row["name"]: row["phase"] for row in json.loads(output)} == {"broken": "unreadable", "healthy": "ready"}
    assert find(pdserve_home, None).path == healthy.path


# Output that nobody reads --------------------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize(
    ("command", "buffering", "code"),
    [
        (("status",), "", 141),
        (("status", "--json"), "1", 141),
        (("logs", "-f"), "", 141),
        (("status", "-w"), "1", 141),
        (("status", "nothing"), "", 8),
    ],
)
def test_a_reader_that_leaves_ends_a_command_quietly(
    pdserve_home: Path, command: tuple[str, ...], buffering: str, code: int
) -> None:
    """An error is reported all the same."""
    (recorded(pdserve_home).logs / "proxy@here.log").write_text("said\n")
    reads, writes = os.pipe()
    os.close(reads)
    done = execute(*PDSERVE, *command, env={"PYTHONUNBUFFERED": buffering}, stdout=writes)
    os.close(writes)
    assert (done.returncode, "no deployment called" in done.stderr) == (code, code == 8), done.stderr
    assert code == 8 or done.stderr == ""


@pytest.mark.process
def test_logs_that_appear_later_are_followed_too(pdserve_home: Path) -> None:
    run = recorded(pdserve_home)
    (run.logs / "lmcache-0@here.log").write_text("first\n")
    argv = [*PDSERVE, "logs", "-f"]
    with subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        assert following.stdout.readline() == "lmcache-0    | first\n"
        (run.logs / "prefill-0@here.log").write_text("second\n")
        assert following.stdout.readline() == "prefill-0    | second\n"
        following.send_signal(signal.SIGINT)


# A launcher that does not see what happened --------------------------------------------------------------------------


@pytest.mark.process
def test_a_process_that_is_gone_is_dead_whatever_is_recorded(pdserve_home: Path) -> None:
    recorded(pdserve_home, prefill=own_identity())
    code, output = pdserve("status", "--json")
    assert (code, json.loads(output)["processes"]["prefill-0"]["phase"]) == (0, "ready")
    recorded(pdserve_home, prefill=ProcessId(pid=os.getpid(), start_ticks=1))
    code, output = pdserve("status", "--json")
    shown = json.loads(output)
    assert (code, shown["phase"], shown["processes"]["prefill-0"]["phase"]) == (5, "degraded", "dead")
    assert "PID is gone" in shown["processes"]["prefill-0"]["note"]
