"""Ctrl-C at any moment: no traceback, nothing left, no key that outlasts its run. And a second one while it stops."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from pdserve.run.directory import RunDir
from pdserve.system.process import pid_end
from tests.launch.deployment import (
    LINE_SECONDS,
    PDSERVE,
    Command,
    Deployment,
    assert_nothing_left,
    execute,
    pdserve,
    read_json,
    recipe,
    serving,
    until,
    up,
    wait_until,
)
from tests.strikes import at_a_call, strike

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


def kill_launcher(deployment: Deployment) -> None:
    """As the kernel does when memory is short: it cannot take its key along."""
    own = deployment.run.key_file.name
    deployment.send_signal("launcher", signal.SIGKILL)
    deployment.command.finish()
    asyncio.run(asyncio.wait_for(pid_end(deployment.id_of("guard").pid), LINE_SECONDS))
    assert keys() == [own]


def test_a_key_lasts_as_long_as_its_run_or_until_the_next_up_or_down(tmp_path: Path, pdserve_home: Path) -> None:
    file = recipe(tmp_path)
    with up(file, pdserve_home) as deployment:
        own = serving(deployment).run.key_file.name
        assert pdserve("up", file)[1].endswith("already up")
        assert keys() == [own]
        deployment.run.key_file.unlink()
        until(deployment.run.key_file.exists)
        kill_launcher(deployment)
    with up(file, pdserve_home) as deployment:
        other = serving(deployment).run.key_file.name
        assert keys() == [other] != [own]
        kill_launcher(deployment)
        assert read_json(pdserve("status", "--json")[1])["phase"] == "lost"
        assert pdserve("down") == (0, "fake: not running")
        assert keys() == []
    with up(file, pdserve_home) as deployment:
        serving(deployment)
        assert pdserve("down") == (0, "fake: stopped")
    assert keys() == []
    assert_nothing_left(deployment)


@pytest.mark.parametrize("file", ["typer/__init__.py", "pdserve/run/directory.py"])
def test_a_command_that_still_imports_ends_without_a_word(
    tmp_path: Path, pdserve_home: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    strike(tmp_path / "site", at_a_call("list", (file, "<module>")), monkeypatch)
    done = execute(*PDSERVE, "list")
    assert done.returncode in (130, -signal.SIGINT), "a shell shows 130 for the signal too"
    assert done.stderr == ""


OPERATIONS = "pdserve/operations/"


@pytest.mark.parametrize(
    ("call", "late", "signum", "options"),
    [
        ((f"{OPERATIONS}look.py", "look"), True, signal.SIGINT, ()),
        (("pdserve/launch/launch_record.py", "record_run"), True, signal.SIGINT, ()),
        ((f"{OPERATIONS}launcher_process.py", "run_here"), False, signal.SIGHUP, ()),
        ((f"{OPERATIONS}launcher_process.py", "start_detached"), False, signal.SIGTERM, ("--detach",)),
    ],
)
def test_an_up_that_has_started_nothing_leaves_no_folder(
    tmp_path: Path,
    pdserve_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: tuple[str, str],
    late: bool,
    signum: signal.Signals,
    options: tuple[str, ...],
) -> None:
    strike(tmp_path / "site", at_a_call("up", call, signum=signum, late=late), monkeypatch)
    code, output = pdserve("up", recipe(tmp_path), *options)
    assert code == 130, output
    assert list(pdserve_home.glob("*/*")) == []
    assert keys() == []


STARTING = "pdserve/run/directory.py", "point_current"
"""The last of what is written before the event loop begins: the record says that it starts."""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP])
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


def test_a_second_term_cuts_no_stream(tmp_path: Path, pdserve_home: Path) -> None:
    with draining(tmp_path, pdserve_home, signal.SIGINT) as (deployment, lines):
        deployment.command.popen.send_signal(signal.SIGTERM)
        assert pdserve("restart", "decode-0")[0] == 8  # the answer of a launcher that has had the signal
        deployment.hold("decode-0", "")
        assert list(lines)[-1] == "data: [DONE]"
        deployment.command.finish()
    assert forced(deployment) == []


def test_a_ctrl_c_while_it_stops_waits_for_no_stream(tmp_path: Path, pdserve_home: Path) -> None:
    with draining(tmp_path, pdserve_home, signal.SIGTERM) as (deployment, lines):
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
