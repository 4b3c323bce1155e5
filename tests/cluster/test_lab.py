"""The laboratory: nodes that are apart, a Slurm that schedules, an sshd that lets in.

Its faults are like those of real machines (silence, death without a word), and nothing of it stays on the machine.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from pdserve.system import procfs
from tests.cluster.cluster import Cluster
from tests.cluster.deployments import LIMIT
from tests.cluster.machine import LabError, cgroups, check_machine
from tests.cluster.spec import LOGIN, SlurmSettings
from tests.launch.deployment import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.full]


def test_a_step_on_every_node_prints_three_names(slurm: Cluster) -> None:
    names = slurm.output(LOGIN, ["srun", "-N3", "hostname"]).split()
    assert sorted(names) == list(slurm.nodes)


def test_every_program_finds_its_libraries(slurm: Cluster) -> None:
    programs = ["slurmctld", "slurmd", "slurmstepd", "munged", "sshd", "srun", "sbatch", "squeue", "ssh"]
    output = slurm.output(
        LOGIN, ["bash", "-c", f"for p in {' '.join(programs)}; do ldd $(command -v $p) || exit; done"]
    )
    assert "libslurmfull" in output
    assert "not found" not in output


def test_each_node_has_its_own_address_and_knows_the_others(bare: Cluster) -> None:
    for node in bare.nodes:
        assert bare.output(node, ["hostname"]) == node
        assert bare.output(node, ["hostname", "-I"]) == bare.address(node)
        for other in bare.nodes:
            assert bare.output(node, ["getent", "hosts", other]).split() == [bare.address(other), other]


def test_loopback_is_each_node_s_own(bare: Cluster) -> None:
    first, second, _ = bare.nodes

    def listen() -> socket.socket:
        return socket.create_server(("127.0.0.1", 8000))

    def connect() -> None:
        socket.create_connection(("127.0.0.1", 8000), timeout=60).close()

    with bare.inside(first, listen):
        bare.inside(first, connect)
        with pytest.raises(ConnectionRefusedError):
            bare.inside(second, connect)


def test_processes_and_shared_memory_are_each_node_s_own(bare: Cluster) -> None:
    first, second, _ = bare.nodes
    with bare.popen(first, ["bash", "-c", "echo > /dev/shm/of_first; echo made; exec sleep 1000"]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"
        wait_until("exec", lambda: [argv for _, argv in bare.processes(first)] == [["sleep", "1000"]], 60)
        assert bare.segments(first) == ["of_first"]
        assert bare.processes(second) == []
        assert bare.segments(second) == []
        assert "sleep 1000" not in bare.output(second, ["ps", "-eo", "args"])
        process.terminate()
    assert process.returncode == -15
    bare.output(first, ["rm", "/dev/shm/of_first"])


def test_two_networks_give_two_interfaces_and_a_small_dev_shm_is_small() -> None:
    with Cluster.up(nodes=2, slurm=False, ssh=False, networks=2, shm="64m") as cluster:
        first, second = cluster.nodes
        shown = cluster.output(first, ["ip", "-o", "-4", "addr", "show", "scope", "global"])
        assert [(line.split()[1], line.split()[3]) for line in shown.splitlines()] == [
            ("eth0", f"{cluster.address(first, 0)}/24"),
            ("eth1", f"{cluster.address(first, 1)}/24"),
        ]
        with cluster.inside(second, lambda: socket.create_server((cluster.address(second, 1), 8000))):
            cluster.inside(first, lambda: socket.create_connection((cluster.address(second, 1), 8000), 60).close())
        assert cluster.output(first, ["df", "--output=size", "-BM", "/dev/shm"]).split()[-1] == "64M"


def test_a_batch_job_runs_on_its_nodes_in_the_folder_of_its_submission(slurm: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\necho batch $(hostname) $PWD\nsrun -l hostname\n")
    done = slurm.run(LOGIN, ["sbatch", "--wait", "-N3", "--output=out.txt", str(script)], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    batch, *steps = (tmp_path / "out.txt").read_text().splitlines()
    assert batch == f"batch {slurm.nodes[0]} {tmp_path}"
    assert sorted(steps) == [f"{index}: {node}" for index, node in enumerate(slurm.nodes)]


def test_gpus_are_scheduled_and_those_that_are_not_there_are_refused(slurm: Cluster) -> None:
    output = slurm.output(LOGIN, ["srun", "-N2", "--gres=gpu:8", "printenv", "CUDA_VISIBLE_DEVICES"])
    assert output.splitlines() == ["0,1,2,3,4,5,6,7"] * 2
    refused = slurm.run(LOGIN, ["srun", "-N1", "--gres=gpu:9", "true"])
    assert refused.returncode != 0
    assert "Requested node configuration is not available" in refused.stderr


def test_settings_reach_slurm() -> None:
    settings = SlurmSettings(kill_wait=2, slurmd_timeout=9, more=("EnforcePartLimits=ALL",))
    with Cluster.up(nodes=1, slurm=settings, ssh=False, gpus=0) as cluster:
        shown = cluster.output(LOGIN, ["scontrol", "show", "config"])
        lines = dict(line.split("=", 1) for line in shown.replace(" ", "").splitlines() if "=" in line)
        assert (lines["KillWait"], lines["SlurmdTimeout"], lines["EnforcePartLimits"]) == ("2sec", "9sec", "ALL")


def test_a_daemon_that_ends_is_reported_with_its_log_and_not_waited_for() -> None:
    with (
        pytest.raises(LabError, match=r"(?s)slurmctld.* ended.*Nonsense"),
        Cluster.up(nodes=1, slurm=SlurmSettings(more=("Nonsense=1",)), ssh=False),
    ):
        pass


def test_ssh_reaches_every_node_from_every_node(bare: Cluster) -> None:
    for client in (LOGIN, *bare.nodes):
        for node in bare.nodes:
            assert bare.output(client, ["ssh", "-F", str(bare.ssh_config), node, "hostname"]) == node


def test_ssh_carries_input_and_exit_codes_and_refuses_strangers(bare: Cluster) -> None:
    ssh = ["ssh", "-F", str(bare.ssh_config)]
    done = bare.run(LOGIN, [*ssh, bare.nodes[1], "cat; exit 7"], stdin="through\n")
    assert (done.stdout, done.returncode) == ("through\n", 7)
    known = bare.ssh_config.with_name("known_hosts")
    stranger = ["ssh", "-F", "/dev/null", "-o", "BatchMode=yes", "-o", f"UserKnownHostsFile={known}"]
    refused = bare.run(LOGIN, [*stranger, bare.nodes[1], "true"])
    assert refused.returncode == 255
    assert "Permission denied" in refused.stderr


def test_http_from_the_test_process_in_a_node_s_network(bare: Cluster, tmp_path: Path) -> None:
    (tmp_path / "answer").write_text("served")
    server, address = bare.nodes[2], bare.address(bare.nodes[2])
    argv = ["python3", "-u", "-m", "http.server", "8000", "--bind", address]
    with bare.popen(server, argv, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert address in process.stdout.readline()
        assert bare.get(bare.nodes[0], f"http://{address}:8000/answer").text == "served"
        connection = bare.http(bare.nodes[1], server, 8000)
        connection.request("GET", "/answer")
        assert connection.getresponse().read() == b"served"
        connection.close()
        process.kill()


def test_a_node_is_not_addressed_from_the_machine_s_own_network(bare: Cluster) -> None:
    with socket.socket() as outside, pytest.raises(LabError, match="is a node: connect from inside"):
        outside.connect((bare.address(bare.nodes[0]), 22))


def test_two_clusters_at_once_do_not_share_a_node_s_name() -> None:
    with ExitStack() as stack:
        clusters = [stack.enter_context(Cluster.up(nodes=1, ssh=False)) for _ in range(2)]
        names = [cluster.output(LOGIN, ["srun", "hostname"]) for cluster in clusters]
        assert names == [cluster.nodes[0] for cluster in clusters]
        assert len(set(names)) == 2


SSH_PORT = 22


def connected(cluster: Cluster, source: str, target: str) -> socket.socket:
    """A connection to a node's sshd that has said its banner."""
    connection = cluster.connect(source, target, SSH_PORT, timeout=60)
    assert connection.recv(100).startswith(b"SSH-2.0")
    return connection


def is_reachable(cluster: Cluster, source: str, target: str) -> bool:
    """At once: what is silent for 2 s is not. One that must be reachable may take its time: `connected`."""
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
            connected(bare, first, third).close()
            bare.heal(second)
            client.settimeout(LIMIT)
            assert client.recv(100) == b"during"
    wait_until("the node is back", lambda: is_reachable(bare, first, second), LIMIT)


def test_isolated_nodes_do_not_reach_each_other_but_everybody_else(bare: Cluster) -> None:
    first, second, third = bare.nodes
    bare.isolate(first)
    bare.isolate(second)
    assert not is_reachable(bare, first, second)
    connected(bare, first, third).close()
    connected(bare, LOGIN, second).close()
    bare.join(first)
    bare.join(second)
    wait_until("they reach each other again", lambda: is_reachable(bare, first, second), LIMIT)


def test_power_off_takes_everything_at_once_without_a_message(bare: Cluster) -> None:
    first, second, _ = bare.nodes
    with connected(bare, first, second) as connection:
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
    connected(bare, first, second).close()


def test_slurm_sees_a_node_lose_power_and_come_back(slurm: Cluster) -> None:
    node = slurm.nodes[1]
    slurm.power_off(node)
    wait_until(f"{node} is down", lambda: slurm.states()[node].startswith("down"), LIMIT)
    slurm.power_on(node)
    slurm.wait_idle()
    assert slurm.output(LOGIN, ["srun", "-w", node, "hostname"]) == node


ROOT = Path(__file__).resolve().parents[2]

OWNER = """
from tests.cluster.cluster import Cluster
with Cluster.up(nodes=2) as cluster:
    step = cluster.popen("pdctl", ["srun", "-N2", "bash", "-c", "setsid sleep 1000 & echo runs; wait"])
    step.stdout.readline(), step.stdout.readline()
    print(cluster.keeper, cluster.spec.prefix, flush=True)
    input()
"""


def traces() -> dict[str, list[str]]:
    """What of the machine a cluster could change."""
    folders = ("/run", "/run/netns", "/etc", "/sys/class/net", "/var/lib/dpkg", "/var/spool")
    state = {name: sorted(os.listdir(name)) if Path(name).is_dir() else [] for name in folders}  # noqa: PTH208
    state["mounts"] = sorted(Path("/proc/self/mounts").read_text().splitlines())
    state["hostname"] = [Path("/proc/sys/kernel/hostname").read_text()]
    for name in ("/var/lib/dpkg/status", "/etc/passwd", "/etc/hosts"):
        state[name] = [str(Path(name).stat().st_mtime_ns)]
    return state


def test_a_forgotten_process_segment_and_job_are_named(slurm: Cluster) -> None:
    node = slurm.nodes[1]
    slurm.output(node, ["bash", "-c", "echo > /dev/shm/forgotten; setsid sleep 1001 >/dev/null 2>&1 &"])
    job = slurm.output(LOGIN, ["sbatch", "--parsable", "--wrap=sleep 1002", "--output=/dev/null"])
    with pytest.raises(AssertionError) as failure:
        slurm.assert_nothing_left(timeout=0)
    for trace in (f"{node}: /dev/shm/forgotten", "sleep 1001", f"job {job} "):
        assert trace in str(failure.value)

    def forgotten() -> list[int]:
        return [pid for pid, argv in slurm.processes(node) if argv == ["sleep", "1001"]]

    wait_until("exec", forgotten, LIMIT)
    (pid,) = forgotten()
    os.kill(pid, signal.SIGKILL)
    slurm.output(node, ["rm", "/dev/shm/forgotten"])
    slurm.output(LOGIN, ["scancel", job])
    slurm.assert_nothing_left(timeout=LIMIT)


def test_a_reset_gives_the_next_test_a_cluster_as_new(slurm: Cluster) -> None:
    first, second, third = slurm.nodes
    slurm.output(first, ["bash", "-c", "echo > /dev/shm/forgotten; setsid sleep 1001 >/dev/null 2>&1 &"])
    slurm.output(LOGIN, ["sbatch", "-w", first, "--wrap=srun sleep 1002", "--output=/dev/null"])
    slurm.cut(second)
    slurm.power_off(third)
    slurm.reset()
    assert slurm.left() == []
    assert sorted(slurm.output(LOGIN, ["srun", "-N3", "hostname"]).split()) == [first, second, third]


def test_a_cancelled_job_takes_along_what_left_its_session(slurm: Cluster) -> None:
    """As with the cgroups of production, by which Slurm finds every process of a job."""
    wrapped = "srun -N2 bash -c 'trap : TERM; setsid sleep 1003 & while :; do wait; done'"
    job = slurm.output(LOGIN, ["sbatch", "--parsable", "-N2", f"--wrap={wrapped}", "--output=/dev/null"])
    running = slurm.nodes[:2]
    wait_until("both run", lambda: all("1003" in str(slurm.processes(node)) for node in running), LIMIT)
    slurm.output(LOGIN, ["scancel", job])
    slurm.assert_nothing_left(timeout=LIMIT)


def test_a_cluster_that_was_used_and_shut_leaves_the_machine_as_it_was() -> None:
    before = traces()
    with Cluster.up(nodes=2) as cluster:
        cluster.output(cluster.nodes[0], ["bash", "-c", "setsid sleep 1000 >/dev/null 2>&1 &"])
        cluster.output(LOGIN, ["srun", "-N2", "true"])
        prefix, members = cluster.spec.prefix, procfs.family({cluster.keeper})
        assert len(members) > 8
        assert cgroups(prefix)
    assert traces() == before
    assert not cgroups(prefix)
    assert not [pid for pid in members if procfs.identify(pid)]


def test_a_killed_test_process_takes_its_cluster_along() -> None:
    before = traces()
    argv = [sys.executable, "-c", OWNER]
    with subprocess.Popen(argv, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        keeper, prefix = owner.stdout.readline().split()
        members = [identity for pid in procfs.family({int(keeper)}) if (identity := procfs.identify(pid))]
        assert len(members) > 12
        owner.kill()
    wait_until("they end", lambda: not any(member.alive() for member in members), LIMIT)
    assert cgroups(prefix) == []
    assert traces() == before


def test_a_signal_reaches_the_program_and_not_only_the_way_to_it(bare: Cluster) -> None:
    script = "trap 'echo caught; exit 3' TERM; echo ready; while :; do sleep 0.01; done"
    with bare.popen(bare.nodes[0], ["bash", "-c", script]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.communicate(timeout=60)[0] == "caught\n"
    assert process.returncode == 3


def test_a_command_that_takes_too_long_is_killed_on_its_node(bare: Cluster) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        bare.run(bare.nodes[0], ["sleep", "1000"], timeout=0.3)
    wait_until("it is gone", lambda: not bare.processes(bare.nodes[0]), LIMIT)


def test_missing_rights_of_the_machine_are_named() -> None:
    program = "from tests.cluster.cluster import Cluster\nwith Cluster.up(slurm=False): pass"
    argv = ["setpriv", "--bounding-set=-sys_admin,-mknod", sys.executable, "-c", program]
    done = subprocess.run(argv, cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 1
    assert "it lacks CAP_SYS_ADMIN (run as root" in done.stderr
    assert "CAP_MKNOD" in done.stderr
    assert "CAP_NET_ADMIN" not in done.stderr


def test_a_machine_without_a_freezer_holds_bare_hosts_only(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"lacks a writable cgroup v1 freezer at .*absent"):
        check_machine(slurm=True, freezer=tmp_path / "absent")
    check_machine(slurm=False, freezer=tmp_path / "absent")


def test_without_a_route_to_packages_the_message_has_the_output_of_apt(tmp_path: Path) -> None:
    program = "import sys, pathlib\nfrom tests.cluster.machine import unpacked\nunpacked(pathlib.Path(sys.argv[1]))"
    argv = ["unshare", "--net", sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(argv, cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 1
    assert "could not be fetched (is there a route to a mirror?)" in done.stderr
    assert "slurmctld" in done.stderr
    assert "apt-get -q" in done.stderr
    assert not (tmp_path / "packages.txt").exists()
