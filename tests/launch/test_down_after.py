"""`pdserve down` once the launcher has answered, and ended."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pdserve.operations import down
from pdserve.run.directory import RunDir
from pdserve.run.inbox import Reply
from pdserve.run.state import DeploymentState
from pdserve.system import procfs
from pdserve.system.procfs import ProcessId
from tests.launch.deployment import LINE_SECONDS

pytestmark = pytest.mark.process


def test_it_does_not_wait_for_a_stranger_with_the_pid_of_the_launcher(
    pdserve_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(down, "lives", lambda *_: True)  # it did when that was asked
    monkeypatch.setattr(down, "ask", lambda *_, **__: Reply(exit_code=0, message="stopped"))
    run = RunDir.create(pdserve_home, "fake", "run-1")
    run.point_current()
    said: list[str] = []
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        launcher = ProcessId(pid=stranger.pid, start_ticks=1)
        host, place = socket.gethostname(), procfs.place()
        state = DeploymentState(name="fake", run_id="run-1", host=host, place=place, launcher=launcher, started_at=0.0)
        run.write(run.state, state.model_dump_json())
        verb = threading.Thread(target=down.down, args=("fake", said.append))
        verb.start()
        verb.join(LINE_SECONDS)
        heard = list(said)
        assert stranger.poll() is None
        stranger.kill()
        verb.join()
    assert heard == ["fake: stopped"]
