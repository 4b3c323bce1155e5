"""`pdserve run`: up, a command against the deployment, down; with the command's exit code, or ours."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pdserve.system import procfs
from tests.launch.deployment import PDSERVE, Command, Deployment, assert_nothing_left, pdserve, recipe

pytestmark = pytest.mark.process

ASK = """\
import json, os, sys, urllib.request
body = json.dumps({"model": os.environ["PDSERVE_MODEL"], "prompt": "one two", "max_tokens": 2}).encode()
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["PDSERVE_API_KEY"]}
request = urllib.request.Request(os.environ["PDSERVE_ENDPOINT"] + "/v1/completions", body, headers)
with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
    print("answered", answer.status, len(json.load(answer)["choices"]))
"""
WAIT = "import signal\nprint('the command waits', flush=True)\nsignal.pause()\n"
PATIENT = (
    "import signal, sys\n"
    "signal.signal(signal.SIGTERM, lambda *_: (print('the command saves', flush=True), sys.exit(0)))\n" + WAIT
)


@contextmanager
def running(file: Path, home: Path, *command: str) -> Iterator[Deployment]:
    """`pdserve run`, ended by Ctrl-C if the test has not ended it."""
    started = Command("run", file, "--", *command)
    try:
        yield Deployment(started, home)
    finally:
        if started.popen.poll() is None:
            started.interrupt()
        started.finish()


def python(program: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-c", program, *arguments)


def test_the_command_reaches_the_model_and_the_deployment_is_gone_after_it(tmp_path: Path, pdserve_home: Path) -> None:
    keys = tmp_path / "keys.jsonl"
    keys.write_text(json.dumps({"name": "other", "sha256": "0" * 64}) + "\n")
    with running(recipe(tmp_path, proxy__auth__keys_file=str(keys)), pdserve_home, *python(ASK)) as deployment:
        assert deployment.command.finish() == 0, deployment.command.output
        output = deployment.command.output
        assert "answered 200 1" in output
        assert output.index("answered 200") < output.index("proxy        stopped")
        assert_nothing_left(deployment)
        assert deployment.state().phase == "stopped"


LEAVES_A_CHILD = """
import subprocess, sys
left = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], stderr=subprocess.DEVNULL)
print("aside", sys.argv[1:], "left", left.pid, "behind", file=sys.stderr)
sys.stdout.buffer.write(bytes(range(256)))
"""


def test_its_output_and_options_are_its_own_and_what_it_leaves_ends_with_it(tmp_path: Path, pdserve_home: Path) -> None:
    argv = [*PDSERVE, "run", str(recipe(tmp_path)), "--", *python(LEAVES_A_CHILD, "--set", "--", "-x y")]
    done = subprocess.run(argv, capture_output=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == bytes(range(256)), "as it is, and without ours"
    assert b"aside ['--set', '--', '-x y']" in done.stderr
    assert b"serving fake at" in done.stderr
    identity = procfs.identify(int(done.stderr.split(b"left ")[1].split()[0]))
    assert identity is None or not identity.alive()


@pytest.mark.parametrize(
    ("program", "code"),
    [("raise SystemExit(4)", 4), ("import os; os.kill(os.getpid(), 9)", 137)],
    ids=["code", "signal"],
)
def test_its_exit_code_is_the_commands(tmp_path: Path, pdserve_home: Path, program: str, code: int) -> None:
    with running(recipe(tmp_path), pdserve_home, *python(program)) as deployment:
        assert deployment.command.finish() == code
        assert "error:" not in deployment.command.output
        assert_nothing_left(deployment)


def test_a_command_that_cannot_be_executed_costs_no_start(tmp_path: Path, pdserve_home: Path) -> None:
    file = tmp_path / "bench.sh"
    file.write_text("#!/bin/sh\n")
    code, output = pdserve("run", recipe(tmp_path), "--", "no-such-program")
    assert (code, "there is no program no-such-program" in output) == (127, True)
    code, output = pdserve("run", recipe(tmp_path), "--", str(file))
    assert (code, f"chmod +x {file}" in output) == (126, True)
    assert not pdserve_home.exists()


def test_a_program_that_the_kernel_refuses_ends_the_deployment(tmp_path: Path, pdserve_home: Path) -> None:
    file = tmp_path / "bench"
    file.write_bytes(b"\x7fELF no program")
    file.chmod(0o755)
    with running(recipe(tmp_path), pdserve_home, str(file)) as deployment:
        assert deployment.command.finish() == 126
        assert "the command cannot be executed" in deployment.command.output
        assert_nothing_left(deployment)


def test_ctrl_c_ends_the_command_and_then_the_deployment(tmp_path: Path, pdserve_home: Path) -> None:
    with running(recipe(tmp_path), pdserve_home, *python(PATIENT)) as deployment:
        deployment.command.expect("the command waits")
        deployment.command.interrupt()
        assert deployment.command.finish() == 130
        output = deployment.command.output
        assert output.index("the command saves") < output.index("proxy        stopped")
        assert_nothing_left(deployment)


def test_a_second_ctrl_c_kills_a_command_that_does_not_end(tmp_path: Path, pdserve_home: Path) -> None:
    stubborn = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: print('no', flush=True))\n" + WAIT
    stubborn += "while True: signal.pause()\n"
    with running(recipe(tmp_path, timeouts__stop_seconds=600), pdserve_home, *python(stubborn)) as deployment:
        deployment.command.expect("the command waits")
        deployment.command.popen.send_signal(signal.SIGTERM)  # as good as a first Ctrl-C
        deployment.command.expect("no")
        deployment.command.interrupt()
        assert deployment.command.finish() == 130
        assert_nothing_left(deployment)


def test_down_from_another_terminal_ends_it(tmp_path: Path, pdserve_home: Path) -> None:
    with running(recipe(tmp_path), pdserve_home, *python(WAIT)) as deployment:
        deployment.command.expect("the command waits")
        assert pdserve("down")[0] == 0
        assert deployment.command.finish() == 130
        assert "is ended, because the deployment ends before it" in deployment.command.output


def test_a_deployment_that_dies_ends_the_command_and_names_the_failure(tmp_path: Path, pdserve_home: Path) -> None:
    with running(recipe(tmp_path), pdserve_home, *python(WAIT)) as deployment:
        deployment.command.expect("the command waits")
        deployment.send_signal("decode-0", signal.SIGKILL)
        assert deployment.command.finish() == 205
        assert "decode-0@" in deployment.command.output
        assert "killed by SIGKILL" in deployment.command.output
        assert_nothing_left(deployment)


def test_a_deployment_that_does_not_start_runs_no_command(tmp_path: Path, pdserve_home: Path) -> None:
    with running(recipe(tmp_path, decode__env={"FAKE_DIE_AT": "load"}), pdserve_home, *python(WAIT)) as deployment:
        assert deployment.command.finish() == 204
        assert "the command waits" not in deployment.command.output


def test_a_wrong_command_line_or_recipe_is_not_a_code_of_the_command(tmp_path: Path, pdserve_home: Path) -> None:
    file = recipe(tmp_path)
    assert pdserve("run", file)[0] == 202
    assert pdserve("run", file, "--frobnicate")[0] == 202
    code, output = pdserve("run", file, "--set", "lmcache.l1_sise_gb=1", "--", "true")
    assert (code, "did you mean l1_size_gb?" in output) == (202, True)
