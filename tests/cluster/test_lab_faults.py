"""Faults of the laboratory are like those of real machines: silence, not errors; death without a word."""

from __future__ import annotations

import socket

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.deployments import LIMIT
from tests.cluster.machine import LabError
from tests.cluster.spec import LOGIN
from tests.launch.deployment import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.full]
SSH_PORT = 22


def connect(cluster: Cluster, source: str, target: str) -> socket.socket:
    """A connection to a node's sshd that has said its banner."""
    connection = cluster.connect(source, target, SSH_PORT, timeout=60)
    assert connection.recv(100).startswith(b"SSH-2.0")
    return connection


def is_reachable(cluster: Cluster, source: str, target: str) -> bool:
    """At once: what is silent for 2 s is not. One that must be reachable may take its time: `connect`."""
    try:
        cluster.connect(source, target, SSH_PORT, timeout=2).close()
    except OSError:
        return False
    return True


def test_a_cut_is_silence_and_healing_lets_the_connection_go_on(bare: Cluster) -> None:
    first, second, third = bare.nodes
    with bare.inside(second, lambda: socket.create_server((bare.address(second), 8000))) as server:
        client = bare.connect(first, second, 8000)
        accepted, _ = server.accept()
        with client, accepted:
            accepted.sendall(b"before")
            assert client.recv(100) == b"before"
            bare.cut(second)
            accepted.sendall(b"during")
            client.settimeout(0.5)
            with pytest.raises(TimeoutError):
                client.recv(100)
            assert not is_reachable(bare, first, second)
            connect(bare, first, third).close()
            bare.heal(second)
            client.settimeout(LIMIT)
            assert client.recv(100) == b"during"
    wait_until("the node is back", lambda: is_reachable(bare, first, second), LIMIT)


def test_isolated_nodes_do_not_reach_each_other_but_everybody_else(bare: Cluster) -> None:
    first, second, third = bare.nodes
    bare.isolate(first)
    bare.isolate(second)
    assert not is_reachable(bare, first, second)
    connect(bare, first, third).close()
    connect(bare, LOGIN, second).close()
    bare.join(first)
    bare.join(second)
    wait_until("they reach each other again", lambda: is_reachable(bare, first, second), LIMIT)


def test_power_off_takes_everything_at_once_without_a_message(bare: Cluster) -> None:
    first, second, _ = bare.nodes
    with connect(bare, first, second) as connection:
        process = bare.popen(second, ["bash", "-c", "echo > /dev/shm/lost; echo made; exec sleep 1000"])
        with process:
            assert process.stdout is not None
            assert process.stdout.readline() == "made\n"
            bare.power_off(second)
            assert process.wait(LIMIT) == -9
        connection.settimeout(0.5)
        with pytest.raises(TimeoutError):
            connection.recv(100)
        with pytest.raises(LabError, match=f"{second} is powered off"):
            bare.run(second, ["true"])
        bare.power_on(second)
        assert bare.segments(second) == []
        assert bare.processes(second) == []
        # The rebooted machine knows nothing of the connection and says so.
        connection.settimeout(LIMIT)
        connection.sendall(b"SSH-2.0-client\r\n")
        with pytest.raises(ConnectionResetError):
            connection.recv(100)
    connect(bare, first, second).close()


def test_slurm_sees_a_node_lose_power_and_come_back(slurm: Cluster) -> None:
    node = slurm.nodes[1]
    slurm.power_off(node)
    wait_until(f"{node} is down", lambda: slurm.states()[node].startswith("down"), LIMIT)
    slurm.power_on(node)
    slurm.wait_idle()
    assert slurm.output(LOGIN, ["srun", "-w", node, "hostname"]) == node
