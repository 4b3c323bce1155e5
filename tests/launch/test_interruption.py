"""Ctrl-C when no launcher runs yet or any more: no traceback, nothing left. And a second signal while one stops."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.launch.deployment import LINE_SECONDS, REPOSITORY, Command, Deployment, pdserve, recipe, up, wait_until
from tests.launch.test_keys import keys, struck
from tests.strikes import at_a_call, strike

pytestmark = pytest.mark.process

STRUCK_IN_AN_IMPORT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background command has it ignored
class Strike:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Strike())
sys.argv = ["pdserve", "list"]
from pdserve.cli.main import main
main()
"""


def ended(script: str) -> tuple[bool, str]:
    """Whether that ended as a Ctrl-C ends a command (a shell shows 130 for the signal too); and its error output."""
    argv = [sys.executable, "-c", script]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=LINE_SECONDS)
    return done.returncode in (130, -signal.SIGINT), done.stderr


@pytest.mark.parametrize("module", ["typer", "pdserve.errors", "pdserve.cli.listing", "pdserve.run.retention"])
def test_a_command_that_still_imports_ends_without_a_word(pdserve_home: Path, module: str) -> None:
    assert ended(STRUCK_IN_AN_IMPORT.format(module=module)) == (True, "")


@pytest.mark.parametrize(("function", "late"), [("look", True), ("record_run", True), ("run_here", False)])
def test_an_up_that_has_started_nothing_leaves_no_folder(
    tmp_path: Path, pdserve_home: Path, function: str, late: bool
) -> None:
    assert struck(function, "SIGINT", recipe(tmp_path), late=late) == 130
    assert list(pdserve_home.glob("*/*")) == []
    assert keys() == []


STARTING = "pdserve/run/directory.py", "point_current"
"""The last of what is written before the event loop begins: the record says that it starts."""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_up_that_has_its_record_but_no_loop_yet_ends_in_order(
    tmp_path: Path, pdserve_home: Path, signum: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    strike(tmp_path / "site", at_a_call("up", STARTING, signum=signum), monkeypatch)
    command = Command("up", recipe(tmp_path))
    assert command.finish() == 130, command.output
    assert "never awaited" not in command.output
    deployment = Deployment(command, pdserve_home)
    assert deployment.state().phase == "stopped"
    assert [event["phase"] for event in deployment.events("down")] == ["stopped"]
    assert deployment.events("start") == []
    assert keys() == []


def test_so_does_a_detached_launcher(tmp_path: Path, pdserve_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = "pdserve.operations.launcher_process"
    strike(tmp_path / "site", at_a_call(launcher, STARTING, signum=signal.SIGTERM), monkeypatch)
    command = Command("up", recipe(tmp_path), "--detach")
    assert command.finish() == 130, command.output
    assert "it was asked to stop before it was ready" in command.output
    deployment = Deployment(command, pdserve_home)
    assert deployment.state().phase == "stopped"
    assert (deployment.run.logs / "launcher.log").read_text() == ""
    assert keys() == []


@contextmanager
def draining(folder: Path, home: Path, signum: signal.Signals) -> Iterator[tuple[Deployment, Iterator[str]]]:
    """A deployment that got this signal while a stream has one token and waits for the next; and that stream."""
    with up(recipe(folder, proxy__drain_seconds=LINE_SECONDS), home) as deployment:
        deployment.command.expect("serving fake at")
        deployment.hold("decode-0", "token")
        body = {"model": "fake", "prompt": "one two three", "max_tokens": 3, "stream": True}
        url = f"{deployment.state().endpoint}/v1/completions"
        client = httpx.Client(trust_env=False, timeout=LINE_SECONDS)
        with client, client.stream("POST", url, json=body) as answer:
            lines = (line for line in answer.iter_lines() if line)
            assert next(lines).startswith("data: {")
            deployment.command.popen.send_signal(signum)
            deployment.wait_for("stop", name="proxy")
            yield deployment, lines


def forced(deployment: Deployment) -> list[str]:
    return [event["name"] for event in deployment.events("stopped") if event["forced"]]


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_term_cuts_no_stream(tmp_path: Path, pdserve_home: Path, first: signal.Signals) -> None:
    with draining(tmp_path, pdserve_home, first) as (deployment, lines):
        deployment.command.popen.send_signal(signal.SIGTERM)
        assert pdserve("restart", "decode-0")[0] == 8  # the answer of a launcher that has had the signal
        deployment.hold("decode-0", "")
        assert list(lines)[-1] == "data: [DONE]"
        deployment.command.finish()
    assert forced(deployment) == []


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_ctrl_c_while_it_stops_waits_for_no_stream(tmp_path: Path, pdserve_home: Path, first: signal.Signals) -> None:
    with draining(tmp_path, pdserve_home, first) as (deployment, lines):
        deployment.command.interrupt()
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
        deployment.command.finish()
    assert forced(deployment) == ["proxy"]


def test_a_second_ctrl_c_reaches_the_launcher_of_a_detached_start(tmp_path: Path, pdserve_home: Path) -> None:
    stubborn = {"FAKE_NEVER_READY": "1", "FAKE_IGNORE_TERM": "1"}
    file = recipe(tmp_path, prefill__env=stubborn, timeouts__stop_seconds=10 * LINE_SECONDS)
    command = Command("up", file, "--detach")
    command.expect("prefill-0    starting")
    deployment = Deployment(command, pdserve_home)
    [log] = deployment.run.logs.glob("prefill-0@*")
    # It ignores TERM by then.
    wait_until("the engine has begun", lambda: "Bootstrap server on port" in log.read_text(), LINE_SECONDS)
    command.interrupt()
    deployment.wait_for("stop", name="prefill-0")
    command.interrupt()
    assert command.finish() == 130, command.output
    assert forced(deployment) == ["prefill-0"]
