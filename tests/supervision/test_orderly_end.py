"""A verb with a child of its own: a Ctrl-C, a TERM and a HUP end it after the child and what it left."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.deployment import execute

pytestmark = pytest.mark.process

VERB = """
import asyncio, os, sys
from pathlib import Path
from pdserve.system.stop_signals import run_to_its_end
from pdserve.system.process import spawn

async def verb():
    left = Path(sys.argv[1], "prompts")
    left.touch()
    log = Path(sys.argv[1], "log")
    child = spawn(["sleep", "600"], env=dict(os.environ), log=log, marker="verb", control_stdin=False)
    print(child.pid, flush=True)
    try:
        await child.wait()
    finally:
        await child.stop(5)
        left.unlink()

try:
    run_to_its_end(verb())
except KeyboardInterrupt:
    sys.exit(130)
"""


def started(folder: Path, *before: str) -> tuple[subprocess.Popen[str], int]:
    """The verb, and the PID of its child."""
    verb = subprocess.Popen(
        [*before, sys.executable, "-c", VERB, str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert verb.stdout is not None
    return verb, int(verb.stdout.readline())


CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


@pytest.mark.parametrize(("signum", "code"), CODES.items(), ids=lambda value: getattr(value, "name", ""))
def test_a_signal_ends_the_child_and_then_the_verb(tmp_path: Path, signum: signal.Signals, code: int) -> None:
    verb, child = started(tmp_path)
    with verb:
        verb.send_signal(signum)
        assert verb.wait(60) == code
    assert not Path(f"/proc/{child}").exists()
    assert not (tmp_path / "prompts").exists()


def test_a_hangup_that_nohup_ignores_ends_nothing(tmp_path: Path) -> None:
    verb, _ = started(tmp_path, "nohup")
    with verb:
        verb.send_signal(signal.SIGHUP)
        verb.send_signal(signal.SIGTERM)
        assert verb.wait(60) == 143


TWICE = """
import asyncio, os, signal
from pdserve.system.stop_signals import run_to_its_end

async def verb():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()
    finally:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0)
        print("cleared up")

run_to_its_end(verb())
"""


def test_a_second_signal_interrupts_no_clearing_up() -> None:
    done = execute(sys.executable, "-c", TWICE)
    assert (done.returncode, done.stdout.splitlines()) == (143, ["cleared up"]), done.stderr
