"""The laboratory itself: its faults are like those of real machines (silence, death without a word), it sees what a
test leaves, and nothing of it stays on the machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pdserve.system import procfs
from tests.cluster.cluster import Cluster
from tests.cluster.deployments import LIMIT
from tests.cluster.machine import cgroups
from tests.cluster.spec import LOGIN
from tests.launch.deployment import REPOSITORY, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.full]

SSH_PORT = 22


def connected(cluster: Cluster, source: str, target: str) -> socket.socket:
    """A connection to a node's sshd that has said its banner."""
    connection = cluster.connect(source, target, SSH_PORT)
    assert connection.recv(100).startswith(b"SSH-2.0")
    return connection


def is_reachable(cluster: Cluster, source: str, target: str) -> bool:
    """At once: what is silent for 2 s is not. One that must be reachable may take its time: `connected`."""
    try:
        cluster.connect(source, target, SSH_PORT, timeout=2).close()
    except OSError:
        return False
    return True


def test_processes_shared_memory_and_loopback_are_each_node_s_own(bare: Cluster) -> None:
    first, second, _ = bare.nodes
    with (
        bare.popen(first, ["bash", "-c", "echo > /dev/shm/of_first; echo made; exec sleep 1000"]) as process,
        bare.inside(first, lambda: socket.create_server(("127.0.0.1", 8000))),
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"
        wait_until("exec", lambda: [argv for _, argv in bare.processes(first)] == [["sleep", "1000"]], 60)
        assert bare.segments(first) == ["of_first"]
        assert (bare.processes(second), bare.segments(second)) == ([], [])
        with pytest.raises(ConnectionRefusedError):
            bare.inside(second, lambda: socket.create_connection(("127.0.0.1", 8000), timeout=60))
        process.terminate()
    assert process.returncode == -15
    bare.output(first, ["rm", "/dev/shm/of_first"])


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
            connected(bare, first, third).close()
            bare.heal(second)
            client.settimeout(LIMIT)
            assert client.recv(100) == b"during"
    wait_until("the node is back", lambda: is_reachable(bare, first, second), LIMIT)


def test_power_off_takes_everything_at_once_without_a_message(bare: Cluster) -> None:
    first, second, _ = bare.nodes
    with connected(bare, first, second) as connection:
        with bare.popen(second, ["bash", "-c", "echo > /dev/shm/lost; echo made; exec sleep 1000"]) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "made\n"
            bare.power_off(second)
            assert process.wait(LIMIT) == -9
        connection.settimeout(0.5)
        with pytest.raises(TimeoutError):
            connection.recv(100)
        bare.power_on(second)
        assert (bare.processes(second), bare.segments(second)) == ([], [])
        # The rebooted machine knows nothing of the connection and says so.
        connection.settimeout(LIMIT)
        connection.sendall(b"SSH-2.0-client\r\n")
        with pytest.raises(ConnectionResetError):
            connection.recv(100)


FORGETFUL = "echo > /dev/shm/forgotten; setsid sleep 1001 >/dev/null 2>&1 &"


def test_a_forgotten_process_segment_and_job_are_named_and_a_reset_takes_them_away(slurm: Cluster) -> None:
    first, second, third = slurm.nodes
    slurm.output(first, ["bash", "-c", FORGETFUL])
    job = slurm.output(LOGIN, ["sbatch", "--parsable", "-w", first, "--wrap=srun sleep 1002", "--output=/dev/null"])
    with pytest.raises(AssertionError) as failure:
        slurm.assert_nothing_left(timeout=0)
    for trace in (f"{first}: /dev/shm/forgotten", "sleep 1001", f"job {job} "):
        assert trace in str(failure.value)
    slurm.cut(second)
    slurm.power_off(third)
    slurm.reset()
    assert slurm.left() == []
    assert sorted(slurm.output(LOGIN, ["srun", "-N3", "hostname"]).split()) == [first, second, third]


OWNER = """
from tests.cluster.cluster import Cluster
with Cluster.up(nodes=2) as cluster:
    step = cluster.popen("pdctl", ["srun", "-N2", "bash", "-c", "setsid sleep 1000 & echo runs; wait"])
    step.stdout.readline(), step.stdout.readline()
    print(cluster.keeper, cluster.spec.prefix, flush=True)
    input()
"""


@contextmanager
def traceless() -> Iterator[None]:
    """Fails if a block changes what of the machine a cluster could change."""
    before = traces()
    yield
    assert traces() == before


def traces() -> dict[str, list[str]]:
    folders = ("/run", "/run/netns", "/etc", "/sys/class/net", "/var/lib/dpkg", "/var/spool")
    state = {name: sorted(os.listdir(name)) if Path(name).is_dir() else [] for name in folders}  # noqa: PTH208
    state["mounts"] = sorted(Path("/proc/self/mounts").read_text().splitlines())
    state["hostname"] = [Path("/proc/sys/kernel/hostname").read_text()]
    for name in ("/var/lib/dpkg/status", "/etc/passwd", "/etc/hosts"):
        state[name] = [str(Path(name).stat().st_mtime_ns)]
    return state


def test_a_cluster_that_was_used_and_shut_leaves_the_machine_as_it_was() -> None:
    with traceless():
        with Cluster.up(nodes=2) as cluster:
            cluster.output(cluster.nodes[0], ["bash", "-c", "setsid sleep 1000 >/dev/null 2>&1 &"])
            cluster.output(LOGIN, ["srun", "-N2", "true"])
            prefix, members = cluster.spec.prefix, procfs.family({cluster.keeper})
            assert len(members) > 8
            assert cgroups(prefix)
        assert not [pid for pid in members if procfs.identify(pid)]
    assert not cgroups(prefix)


def test_a_killed_test_process_takes_its_cluster_along() -> None:
    with traceless():
        argv = [sys.executable, "-c", OWNER]
        with subprocess.Popen(argv, cwd=REPOSITORY, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
            assert owner.stdout is not None
            keeper, prefix = owner.stdout.readline().split()
            members = [identity for pid in procfs.family({int(keeper)}) if (identity := procfs.identify(pid))]
            assert len(members) > 12
            owner.kill()
        wait_until("they end", lambda: not any(member.alive() for member in members), LIMIT)
    assert cgroups(prefix) == []


def test_missing_rights_of_the_machine_are_named() -> None:
    program = "from tests.cluster.cluster import Cluster\nwith Cluster.up(slurm=False): pass"
    argv = ["setpriv", "--bounding-set=-sys_admin,-mknod", sys.executable, "-c", program]
    done = subprocess.run(argv, cwd=REPOSITORY, text=True, capture_output=True)
    assert done.returncode == 1
    assert "it lacks CAP_SYS_ADMIN (run as root" in done.stderr
    assert "CAP_MKNOD" in done.stderr
    assert "CAP_NET_ADMIN" not in done.stderr
