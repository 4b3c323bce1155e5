"""What stands in the way of a plain answer: damaged files, closed pipes, folders that cannot be made."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from pdserve.cli.console import Console
from pdserve.errors import StateError
from pdserve.launch.failure import start_error
from pdserve.reach.protocol import Died, Late
from pdserve.run.directory import RunDir, find
from pdserve.run.state import DeploymentState, NodeState, ProcessState
from pdserve.system import procfs
from pdserve.system.process import new_token
from pdserve.system.procfs import ProcessId
from tests.launch.deployment import LINE_SECONDS, REPOSITORY, Deployment, pdserve, recipe, up
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


def test_a_late_process_with_the_cause_in_its_log_is_explained(tmp_path: Path) -> None:
    tail = ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",)
    error = start_error(late(*tail), plan(planned_recipe()), RunDir(tmp_path))
    assert error.cause is not None
    assert "device ran out" in error.cause
    assert error.cause.endswith("last answer of its probe: nothing listens on port 8100")
    assert error.todo is not None
    assert "prefill.args" in error.todo
    assert str(tmp_path / "diagnostics/prefill-0-1.txt") in error.todo


def test_a_late_process_without_a_cause_in_its_log_has_its_probe_as_the_cause(tmp_path: Path) -> None:
    error = start_error(late("thinking"), plan(planned_recipe()), RunDir(tmp_path))
    assert error.cause == "last answer of its probe: nothing listens on port 8100"
    assert error.todo is not None
    assert "timeouts.*" in error.todo


def test_no_file_is_named_where_none_could_be_saved(tmp_path: Path) -> None:
    unsaved = late("thinking").model_copy(update={"diagnostics": None})
    error = start_error(unsaved, plan(planned_recipe()), RunDir(tmp_path))
    assert error.todo is not None
    assert "timeouts.*" in error.todo
    assert error.todo.endswith(f"stacks, children and sockets could not be saved in {tmp_path / 'diagnostics'}")


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
    assert error.what == (
        "decode (PID 7) killed by the kernel for memory (limit 4.0 GiB, peak 4.0 GiB) after 3.0 s, while starting"
    )
    assert error.cause == "it needed more memory than was left, by the kernel's own count for its cgroup"
    assert "raise the limit" in str(error.todo)


# A failure after which what is healthy is kept ----------------------------------------------------------------------

FAILED = {"at": 1.0, "event": "failed", "exit_code": 4, "error": "decode-0@here: it died\n  | [Errno 12] last line"}


def recorded(
    home: Path, name: str = "fake", *, launcher: int | None = None, prefill: ProcessId | None = None
) -> RunDir:
    """A run of a deployment that says it is ready, served by the process of that PID (this one)."""
    run = RunDir.create(home, name, f"run-of-{name}")
    identity = procfs.identify(launcher or os.getpid())
    assert identity is not None
    state = DeploymentState(
        token=new_token(),
        name=name,
        run_id=run.run_id,
        phase="ready",
        host=socket.gethostname(),
        launcher=identity,
        nodes={"localhost": NodeState(agent=identity, guard=identity, hostname=socket.gethostname())},
        processes={"prefill-0": ProcessState(role="prefill", node="localhost", phase="ready", id=prefill)},
        started_at=time.time(),
    )
    run.write(run.state, state.model_dump_json())
    run.write(run.plan, plan(planned_recipe()).model_dump_json())
    run.point_current()
    return run


def printed(event: dict[str, object], run: RunDir, capsys: pytest.CaptureFixture[str]) -> str:
    """What the console prints of one event, after its head."""
    console = Console()
    console.begin(run, plan(planned_recipe()))
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
        console = Console()
        console.note("before the run")
        console.begin(run, plan(planned_recipe()))
        console.event({**FAILED, "kept": True})
        console.result("done")
        console.end(detached=True)
    error = capsys.readouterr().err
    assert error.count("stdout: the progress cannot be written: No space left on device") == 1
    assert "pdserve status" in error
    assert "error: decode-0@here: it died" in error


def test_the_warning_of_a_run_names_where_its_history_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = recorded(tmp_path)
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        Console().begin(run, plan(planned_recipe()))
    assert f"{run.events} the history" in capsys.readouterr().err


def test_where_neither_stream_takes_anything_nothing_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w") as out, Path("/dev/full").open("w") as err:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        console = Console()
        console.warn(["a warning"])
        console.begin(recorded(tmp_path), plan(planned_recipe()))
        console.event({**FAILED, "kept": True})
        console.end(detached=True)


@pytest.mark.process
@pytest.mark.full
def test_up_on_a_full_disk_below_stdout_serves_and_says_so(tmp_path: Path, pdserve_home: Path) -> None:
    argv = [sys.executable, "-m", "pdserve.cli.main", "up", str(recipe(tmp_path)), "--detach"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY, check=False)
    try:
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
        assert done.stderr.count("stdout: the progress cannot be written") == 1
        assert json.loads(pdserve("status", "--json")[1])["phase"] == "ready"
    finally:
        assert pdserve("down")[0] == 0


@pytest.mark.process
@pytest.mark.full
def test_an_up_that_fails_on_a_full_disk_below_stdout_ends_with_its_own_error(
    tmp_path: Path, pdserve_home: Path
) -> None:
    argv = [sys.executable, "-m", "pdserve.cli.main", "up", str(recipe(tmp_path, decode__env={"FAKE_DIE_AT": "load"}))]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY, check=False)
    assert done.returncode == 4, done.stderr
    assert "error: decode-0@" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_failure_that_ends_the_command_is_named_at_once_and_reported_at_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The teardown in between may take a minute."""
    assert printed(FAILED, recorded(tmp_path), capsys).endswith("] failed: decode-0@here: it died\n")


def test_a_follower_leaves_a_kept_failure_to_its_own_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed({**FAILED, "kept": True}, recorded(tmp_path, launcher=1), capsys) == ""


@pytest.mark.process
def test_in_the_foreground_a_kept_failure_names_its_log(tmp_path: Path, pdserve_home: Path) -> None:
    dies = {"FAKE_DIE_AT": "load", "FAKE_EXIT_CODE": "7", "FAKE_LAST_LINES": "the very last words"}
    with up(recipe(tmp_path, decode__env=dies), pdserve_home, "--keep-on-failure") as deployment:
        deployment.command.expect("error: decode-0@")
        deployment.command.expect("| the very last words")
        deployment.command.expect("next: pdserve status fake")


@pytest.mark.process
@pytest.mark.full
def test_detached_a_kept_failure_is_reported_once(tmp_path: Path, pdserve_home: Path) -> None:
    dies = {"FAKE_DIE_AT": "load", "FAKE_LAST_LINES": "the very last words"}
    code, output = pdserve("up", recipe(tmp_path, decode__env=dies), "--detach", "--keep-on-failure")
    assert pdserve("down")[0] == 0
    assert code == 4
    assert output.count("the very last words") == 1, output


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


DAMAGED = {"empty": b"", "garbage": b"\xff\x00{", "edited": b'{"schema_version": 1, "name": "fake"}'}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
@pytest.mark.parametrize("file", ["state.json", "plan.json"])
def test_a_damaged_record_is_named(tmp_path: Path, file: str, content: bytes) -> None:
    run = recorded(tmp_path)
    (run.path / file).write_bytes(content)
    read = run.read_state if file == "state.json" else run.read_plan
    with pytest.raises(StateError, match=f"this {file} is damaged") as raised:
        read()
    assert raised.value.where == str(run.path / file)


@pytest.mark.parametrize("number", [None, 0, 2, "1"])
@pytest.mark.parametrize("file", ["state.json", "plan.json"])
def test_a_record_of_another_version_is_refused_whatever_else_is_in_it(
    tmp_path: Path, file: str, number: object
) -> None:
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
def test_the_commands_report_it_without_a_traceback(pdserve_home: Path) -> None:
    run = recorded(pdserve_home)
    run.state.write_bytes(b"")
    for command in ("status", "down"):
        code, output = pdserve(command, "fake")
        assert code == 8, output
        assert output.startswith(f"error: {run.state}: ")


@pytest.mark.process
def test_one_damaged_record_does_not_hide_the_others(pdserve_home: Path) -> None:
    recorded(pdserve_home, "broken").state.write_bytes(b"{")
    healthy = recorded(pdserve_home, "healthy")
    code, output = pdserve("list", "--json")
    assert code == 0, output
    assert {row["name"]: row["phase"] for row in json.loads(output)} == {"broken": "unreadable", "healthy": "ready"}
    assert find(pdserve_home, None).path == healthy.path


# Output that nobody reads --------------------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize("command", [("status",), ("status", "--json"), ("list",), ("logs", "-f"), ("status", "-w")])
@pytest.mark.parametrize("buffering", ["", "1"], ids=["buffered", "unbuffered"])
def test_a_reader_that_leaves_ends_a_command_quietly(
    pdserve_home: Path, command: tuple[str, ...], buffering: str
) -> None:
    (recorded(pdserve_home).logs / "proxy@here.log").write_text("said\n")
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run(
        [sys.executable, "-m", "pdserve.cli.main", *command],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONUNBUFFERED": buffering},
        stdout=writes,
        stderr=subprocess.PIPE,
        timeout=LINE_SECONDS,
    )
    os.close(writes)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.process
def test_an_error_is_reported_even_if_the_output_is_closed(pdserve_home: Path) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run(
        [sys.executable, "-m", "pdserve.cli.main", "status"],
        cwd=REPOSITORY,
        stdout=writes,
        stderr=subprocess.PIPE,
        timeout=LINE_SECONDS,
    )
    os.close(writes)
    assert done.returncode == 8
    assert b"nothing was started yet" in done.stderr


@pytest.mark.process
def test_a_deployment_serves_on_when_its_output_is_not_read(tmp_path: Path, pdserve_home: Path) -> None:
    serving = subprocess.Popen(
        [sys.executable, "-m", "pdserve.cli.main", "up", str(recipe(tmp_path, status="tested"))],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert serving.stdout is not None
    assert serving.stderr is not None
    try:
        assert "record: " in serving.stdout.readline()
        assert "starting" in serving.stdout.readline()
        serving.stdout.close()
        Deployment(None, pdserve_home).wait_for("up")
    finally:
        serving.send_signal(signal.SIGINT)
        stderr = serving.stderr.read()
        serving.stderr.close()
    assert serving.wait(LINE_SECONDS) == 0
    # What this machine is short of may be said before.
    assert [line for line in stderr.splitlines() if not line.startswith("warning: ")] == []


def fill(pipe: int) -> None:
    """Until nothing more can be written to it, as to a terminal after Ctrl-S or a pager that shows its first page."""
    end = os.open(f"/proc/self/fd/{pipe}", os.O_WRONLY | os.O_NONBLOCK)  # of our own: the launcher's would wait
    with suppress(BlockingIOError):
        while os.write(end, b"-"):
            pass
    os.close(end)


@pytest.mark.process
@pytest.mark.full
def test_a_deployment_is_supervised_when_its_output_is_open_and_nobody_reads_it(
    tmp_path: Path, pdserve_home: Path
) -> None:
    reads, writes = os.pipe()
    fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, 4096)
    argv = [sys.executable, "-m", "pdserve.cli.main", "up", str(recipe(tmp_path, status="tested"))]
    with (
        subprocess.Popen(argv, cwd=REPOSITORY, stdout=writes, stderr=subprocess.DEVNULL) as serving,
        os.fdopen(reads, "r") as output,
    ):
        deployment = Deployment(None, pdserve_home)
        try:
            assert "record: " in output.readline()
            fill(writes)
            deployment.wait_for("up")
            deployment.send_signal("proxy", signal.SIGKILL)
            deployment.wait_for("restarting", name="proxy")
        finally:
            os.close(writes)
            serving.send_signal(signal.SIGINT)
        assert "proxy        died" in output.read(), "what waited is printed before the end"
        assert serving.wait(LINE_SECONDS) == 0


@pytest.mark.process
def test_a_watched_status_is_plain_blocks_when_piped(pdserve_home: Path) -> None:
    recorded(pdserve_home)
    with subprocess.Popen(
        [sys.executable, "-m", "pdserve.cli.main", "status", "--watch"],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    ) as watching:
        assert watching.stdout is not None
        heads = (line for line in watching.stdout if line.startswith("fake: ready"))
        assert next(heads) == next(heads)
        watching.send_signal(signal.SIGINT)


@pytest.mark.process
def test_logs_that_appear_later_are_followed_too(pdserve_home: Path) -> None:
    run = recorded(pdserve_home)
    (run.logs / "lmcache-0@here.log").write_text("first\n")
    with subprocess.Popen(
        [sys.executable, "-m", "pdserve.cli.main", "logs", "-f"],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    ) as following:
        assert following.stdout is not None
        assert following.stdout.readline() == "lmcache-0    | first\n"
        (run.logs / "prefill-0@here.log").write_text("second\n")
        assert following.stdout.readline() == "prefill-0    | second\n"
        following.send_signal(signal.SIGINT)


# A launcher that does not see what happened --------------------------------------------------------------------------


@pytest.mark.process
def test_a_process_that_is_gone_is_dead_whatever_is_recorded(pdserve_home: Path) -> None:
    recorded(pdserve_home, prefill=ProcessId(pid=os.getpid(), start_ticks=1))
    code, output = pdserve("status", "--json")
    assert code == 5
    shown = json.loads(output)
    assert shown["phase"] == "degraded"
    assert shown["processes"]["prefill-0"]["phase"] == "dead"
    assert "PID is gone" in shown["processes"]["prefill-0"]["note"]


@pytest.mark.process
def test_a_process_that_lives_is_in_its_recorded_phase(pdserve_home: Path) -> None:
    recorded(pdserve_home, prefill=procfs.identify(os.getpid()))
    code, output = pdserve("status", "--json")
    assert code == 0
    assert json.loads(output)["processes"]["prefill-0"]["phase"] == "ready"
