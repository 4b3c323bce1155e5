"""The laboratory itself: nodes that are apart, a Slurm that schedules, an sshd that lets in."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.machine import LabError
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
