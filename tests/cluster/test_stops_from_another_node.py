"""What `status` and `down` say of nodes and launchers that they cannot speak to."""

from __future__ import annotations

import signal
import subprocess

import pytest

from tests.cluster.deployments import LIMIT, PDSERVE, ClusterDeployment, Lab
from tests.cluster.spec import LOGIN
from tests.launch.deployment import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.full]


def of_pdserve(hosts: Lab, node: str) -> list[int]:
    """Agent and guard, and what they started. sshd's sessions end when the network is back."""
    return [pid for pid, argv in hosts.cluster.processes(node) if "sshd" not in argv[0]]


def stop_order_of(up: ClusterDeployment, process: str) -> None:
    wait_until(
        f"{process} told to stop", lambda: any(e["name"] == process for e in up.events("stop")), LIMIT, why=up.printed
    )


def test_a_node_that_is_cut_off_while_it_stops_is_named_with_what_happens_there(hosts: Lab) -> None:
    recipe = hosts.recipe(decode__env={"FAKE_IGNORE_TERM": "1"}, timeouts__stop_seconds=20)
    with hosts.up(LOGIN, recipe, "--cluster", hosts.hosts()) as up:
        up.ready()
        node = up.node_of("decode-0")
        with hosts.cluster.popen(
            LOGIN, [*PDSERVE, "down"], env=hosts.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as down:
            stop_order_of(up, "decode-0")
            hosts.cluster.cut(node)
            output, _ = down.communicate(timeout=LIMIT)
        assert down.returncode == 0, output
        assert output.startswith(f"fake: stopped; {node} was not reached (not heard for"), output
        assert "stops what runs there by itself, at the latest 8 s after it last heard from here" in output
        assert "`pdserve down fake`, typed there, clears up what else is left" in output
        up.expect(f"{node} was not reached (not heard for")
        assert up.ended() == "0"
        wait_until(f"nothing of ours on {node}", lambda: not of_pdserve(hosts, node), LIMIT)
        hosts.cluster.heal(node)
    hosts.cluster.assert_nothing_left(timeout=LIMIT)


def test_a_killed_launcher_is_shown_on_another_node_as_not_heard_and_down_is_no_failure(hosts: Lab) -> None:
    other_node = hosts.cluster.nodes[2]  # nothing of it runs there
    with hosts.up(LOGIN, hosts.recipe(), "--cluster", hosts.hosts()) as up:
        up.ready()
        assert hosts.pdserve(other_node, "status").returncode == 0
        up.process.send_signal(signal.SIGKILL)

        def not_heard() -> bool:
            return "when its launcher was last heard" in hosts.pdserve(other_node, "status").stdout

        wait_until("not heard", not_heard, LIMIT)
        done = hosts.pdserve(other_node, "status")
        assert done.returncode == 5
        assert done.stdout.startswith("fake: unresponsive; it was ready when its launcher was last heard, "), (
            done.stdout
        )
        down = hosts.pdserve(other_node, "down")
        assert down.returncode == 0, down.stdout + down.stderr
        assert "was not heard for" in down.stdout.splitlines()[0]
        assert "was gone before it could stop anything: the agents of" in down.stdout
        assert hosts.pdserve(other_node, "status").stdout.startswith("fake: lost")
    hosts.cluster.assert_nothing_left()


def test_once_a_lost_node_was_cleared_it_is_not_named_again(hosts: Lab) -> None:
    with hosts.up(LOGIN, hosts.recipe(), "--cluster", hosts.hosts()) as up:
        up.ready()
        node = up.node_of("decode-0")
        hosts.kill_agent_and_guard(node)
        assert up.ended() == "5"
    hint = f"{node} was lost: run `pdserve down"
    assert hint in hosts.pdserve(LOGIN, "down").stdout
    assert hosts.pdserve(node, "down").returncode == 0
    assert hint not in hosts.pdserve(LOGIN, "down").stdout
    hosts.cluster.assert_nothing_left()
