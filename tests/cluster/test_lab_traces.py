"""Nothing stays: what a test forgets on a node is found, and a cluster leaves no trace on the machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.system import procfs
from tests.cluster.cluster import Cluster
from tests.cluster.deployments import LIMIT
from tests.cluster.machine import LabError, cgroups, check_machine
from tests.cluster.spec import LOGIN
from tests.launch.deployment import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.full]
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
