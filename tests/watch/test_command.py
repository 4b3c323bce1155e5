"""`pdserve status --watch` on a deployment of fakes: a terminal, a pipe, JSON; Ctrl-C; the next run."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pdserve.cli.commands import app
from pdserve.observe.watch import DeploymentWatch
from pdserve.run.directory import RunDir, home
from tests.launch.deployment import LINE_SECONDS, PDSERVE, REPOSITORY, recipe, up
from tests.launch.records import write_record
from tests.launch.test_robustness import recorded

pytestmark = pytest.mark.process
STATUS = (*PDSERVE, "status", "--watch", "--interval", "0.5")


@contextmanager
def watching(
    *arguments: str, stdout: int = subprocess.PIPE, end: signal.Signals = signal.SIGINT, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """The command, ended by this signal. `options`: of Popen."""
    with subprocess.Popen(
        [*STATUS, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    ) as command:
        try:
            yield command
        finally:
            command.send_signal(end)
            command.wait(LINE_SECONDS)


def frames(command: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert command.stdout is not None
    for line in command.stdout:
        yield json.loads(line)


def test_the_last_minute_of_a_deployment_that_serves(tmp_path: Path, pdserve_home: Path) -> None:
    with up(recipe(tmp_path, status="tested"), pdserve_home) as deployment:
        deployment.wait_for("up")
        with watching("--json") as command:
            looks = frames(command)
            first = next(looks)
            assert first["last_minute"]["traffic"]["seconds"] == 0
            assert "up" in [event["event"] for event in first["events"]]
            body = {"model": "fake", "prompt": "a prompt of some words", "max_tokens": 4}
            assert deployment.post("/v1/completions", body)[0] == 200
            look = next(
                look for look in looks if (look["last_minute"]["traffic"]["ttft"] or {"count": 0})["count"] == 1
            )
        traffic = look["last_minute"]["traffic"]
        assert traffic["measured_by"] == "proxy"
        assert traffic["requests"] > 0
        assert traffic["errors"] == 0
        assert traffic["output_tokens"] * traffic["seconds"] == pytest.approx(4)
        assert look["last_minute"]["engines"]["decode-0"]["received"] > 0
        assert "up" not in [event["event"] for event in look["events"]], "an event is news once"
        assert command.returncode == 130


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP])
def test_a_terminal_is_given_back_at_the_end(pdserve_home: Path, signum: signal.Signals) -> None:
    recorded(pdserve_home)
    master, terminal = pty.openpty()
    with watching(stdout=terminal, end=signum) as command:
        os.close(terminal)
        shown = b""
        while shown.count(b"fake: ready") < 2:
            shown += os.read(master, 65536)
        assert b"\x1b[?1049h" in shown
    while b"\x1b[?1049l" not in shown:
        shown += os.read(master, 65536)
    os.close(master)
    assert command.returncode == 130
    assert command.stderr is not None
    assert b"\x1b[?25h" in shown, "the cursor is shown again"


def test_a_watch_goes_on_with_the_next_run(pdserve_home: Path) -> None:
    recorded(pdserve_home)
    watch = DeploymentWatch(home(os.environ), None)
    assert watch.look().view.run_dir.endswith("run-of-fake")
    first = RunDir(pdserve_home / "fake" / "run-of-fake")
    state = first.read_state().model_copy(update={"run_id": "run-2"})
    following = write_record(RunDir.create(pdserve_home, "fake", "run-2"), state, first.read_plan())
    following.append_event("phase", phase="ready")
    look = watch.look()
    assert look.view.run_dir.endswith("run-2")
    assert [event["event"] for event in look.news] == ["phase"]


@pytest.mark.parametrize(
    ("arguments", "why"), [(("--interval", "1"), "belongs to --watch"), (("--watch", "--interval", "0"), "0.5")]
)
def test_intervals_that_mean_nothing_are_refused(arguments: tuple[str, ...], why: str) -> None:
    ended = CliRunner().invoke(app, ["status", *arguments])
    assert ended.exit_code == 2
    assert why in ended.output
