"""Where the command of `pdserve run` can run: on a machine that reaches the proxy."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import CommandError, PreflightError
from pdserve.node.agent_record import AgentRecord
from pdserve.operations.client_command import ClientCommand
from pdserve.plan.model import Plan
from pdserve.plan.node import Node, Ssh
from pdserve.run.directory import RunDir
from pdserve.run.orphans import COMMAND, list_living, stop_left
from pdserve.run.state import NodeState
from pdserve.system import procfs
from pdserve.system.process import send
from tests.launch.deployment import REPOSITORY
from tests.launch.records import GONE, HERE, recorded_state
from tests.plan import kit
from tests.tables import each_row


def planned(hostname: str | None, *, host: str = "127.0.0.1") -> Plan:
    settings: dict[str, Any] = {"proxy": {"host": host}}
    node = Node(name="gpu1", address="192.0.2.1", hostname=hostname, reach=Ssh(destination="gpu1"))
    return kit.plan(kit.recipe(settings), node)


def command() -> ClientCommand:
    return ClientCommand(["true"], os.environ)


def test_a_proxy_on_loopback_of_another_machine_is_refused_before_anything_starts() -> None:
    with pytest.raises(PreflightError) as refused:
        command().check(planned("gpu1.example"))
    assert "the proxy would listen on loopback of gpu1" in refused.value.what
    assert "--set proxy.host=0.0.0.0" in (refused.value.todo or "")


@each_row("plan", [
    planned(socket.gethostname()),
    planned("gpu1.example", host="0.0.0.0"),
    kit.plan(kit.recipe()),
])  # fmt: skip
def test_a_proxy_that_is_reached_is_fine(plan: Plan) -> None:
    command().check(plan)


def test_a_program_is_looked_for_in_the_path_of_its_own_environment() -> None:
    with pytest.raises(CommandError) as missing:
        ClientCommand(["true"], {"PATH": "/nowhere"})
    assert missing.value.exit_code == 127


LAUNCHER = """
import asyncio, os, sys
from pathlib import Path
from pdserve.operations.client_command import ClientCommand
from pdserve.run.directory import RunDir
from tests.plan import kit

async def main():
    run = RunDir(Path(sys.argv[1]))
    state = run.read_state()
    record = lambda *_, **__: run.write(run.state, state.model_dump_json())
    await ClientCommand(sys.argv[2:], os.environ).run(kit.plan(kit.recipe()), state, "key", record)

asyncio.run(main())
"""
WAITS = "import os, signal; print(os.getpid(), flush=True); signal.pause()"


def launched(run: RunDir, *command: str) -> subprocess.Popen[str]:
    """A launcher that runs the command, and keeps the record."""
    place = procfs.place()
    # Its agent and guard have left by themselves, as they do when a launcher's pipe closes.
    agent = AgentRecord(guard=GONE, hostname=HERE, place=place, cgroup=None, over=True)
    (run.path / f"agent@n-{GONE.pid}.json").write_text(agent.model_dump_json())
    node = NodeState(agent=GONE, guard=GONE, hostname=HERE, place=place)
    state = recorded_state(name="test", run_id=run.run_id, place=place, nodes={"n": node}, started_at=time.time())
    run.write(run.state, state.model_dump_json())
    argv = [sys.executable, "-c", LAUNCHER, str(run.path), *command]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)


@pytest.mark.process
def test_the_command_of_a_launcher_that_was_killed_is_found_by_the_record(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "test", "run-1")
    with launched(run, sys.executable, "-c", WAITS) as launcher:
        assert launcher.stdout is not None
        command = int(launcher.stdout.readline())
        identity = procfs.identify(command)
        while run.read_state().command != identity:
            pass  # it is recorded as soon as it was started
        launcher.kill()
        launcher.wait()
        state = run.read_state()
        assert [line.startswith(f"{COMMAND} PID {command} ") for line in list_living(state, run)] == [True]
        asyncio.run(stop_left(state, run))
        assert not list_living(state, run)


@pytest.mark.process
def test_what_leaves_the_session_of_the_command_ends_with_it(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "test", "run-1")
    until = tmp_path / "until"
    os.mkfifo(until)
    daemon = f"setsid {sys.executable} -c '{WAITS}' &"
    with launched(run, "sh", "-c", f"{daemon} read -r line < {until}") as launcher:
        assert launcher.stdout is not None
        identity = procfs.identify(int(launcher.stdout.readline()))
        assert identity is not None
        assert identity.alive()
        until.write_text("end\n")
        launcher.wait()
        left = identity.alive()
        send(identity, signal.SIGKILL)
        assert not left


@pytest.mark.process
def test_what_the_command_leaves_to_the_launcher_is_collected_when_it_has_ended(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "test", "run-1")
    first, last = tmp_path / "first", tmp_path / "last"
    for each in (first, last):
        os.mkfifo(each)
    orphan = f"(sh -c 'echo $$; read -r line < {first}' &)"
    with launched(run, "sh", "-c", f"{orphan}; read -r line < {last}") as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        first.write_text("end\n")
        while procfs.identify(pid) is not None:
            pass  # a zombie still has its PID
        last.write_text("end\n")
        launcher.wait()
