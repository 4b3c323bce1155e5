"""Where the command of `pdserve run` can run: on a machine that reaches the proxy."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

from pdserve.errors import CommandError, PreflightError
from pdserve.operations.client_command import ClientCommand
from pdserve.plan.model import Plan
from pdserve.plan.nodes.node import Node
from pdserve.plan.nodes.reach import Ssh
from tests.plan import kit


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


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(planned(socket.gethostname()), id="this machine, by ssh or as a node of a job"),
        pytest.param(planned("gpu1.example", host="0.0.0.0"), id="the proxy is open to the network"),
        pytest.param(kit.plan(kit.recipe()), id="no other machine"),
    ],
)
def test_a_proxy_that_is_reached_is_fine(plan: Plan) -> None:
    command().check(plan)


def test_a_program_is_looked_for_in_the_path_of_its_own_environment() -> None:
    with pytest.raises(CommandError) as missing:
        ClientCommand(["true"], {"PATH": "/nowhere"})
    assert missing.value.exit_code == 127


def test_without_a_run_there_is_no_exit_code() -> None:
    with pytest.raises(KeyboardInterrupt):
        command().exit_code()
