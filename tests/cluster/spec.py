"""The files of a cluster: what lies over /etc of its nodes, with Slurm's configuration; ssh's and sshd's."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

LOGIN = "pdctl"
"""The controller and login node; the switch of the network lives there too."""
GPUS = 8
"""Fake ones of each node."""
MUNGE_SOCKET = "/run/lab/munge.socket"
FAKE_GPU = "/run/lab/fakegpu"


def write_files(folder: Path, addresses: Mapping[str, str], slurm: Sequence[str] | None) -> None:
    """Makes the cluster's folder anew; logs of the last cluster of that name go. `slurm`: further lines of its
    configuration; None: without it."""
    shutil.rmtree(folder, ignore_errors=True)
    etc = folder / "etc"
    for each in (etc / "docker", etc / "slurm", folder / "log", folder / "state"):  # docker keeps a key in the first
        each.mkdir(parents=True)
    hosts = ["127.0.0.1 localhost", "::1 localhost ip6-localhost", *(f"{ip} {node}" for node, ip in addresses.items())]
    (etc / "hosts").write_text("\n".join(hosts) + "\n")
    passwd = Path("/etc/passwd").read_text()
    if "\nsshd:" not in passwd:  # the user to which sshd drops before a login
        passwd += "sshd:x:109:65534::/run/sshd:/usr/sbin/nologin\n"
    (etc / "passwd").write_text(passwd)
    if slurm is not None:
        _write_slurm(folder, addresses, slurm)
    (folder / "sshd_config").write_text(f"""\
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
# The repository's folder may belong to anybody.
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
UseDNS no
PidFile none
MaxStartups 100
LogLevel VERBOSE
""")
    (folder / "ssh_config").write_text(f"""\
Host *
  User root
  IdentityFile {folder}/key
  IdentitiesOnly yes
  IdentityAgent none
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  BatchMode yes
  ConnectTimeout 5
""")


def _write_slurm(folder: Path, addresses: Mapping[str, str], more: Sequence[str]) -> None:
    nodes = [node for node in addresses if node != LOGIN]
    prefix = nodes[0].removesuffix("0")
    of_node = f"CPUs=16 RealMemory=65536 Gres=gpu:{GPUS} State=UNKNOWN"
    lines = [f"NodeName={node} NodeHostname={node} NodeAddr={addresses[node]} {of_node}" for node in nodes]
    settings = "\n".join((*lines, *more))
    (folder / "etc/slurm/slurm.conf").write_text(f"""\
ClusterName={prefix}
# slurmctld compares it with its own hostname, which is the login node's.
SlurmctldHost={LOGIN}({addresses[LOGIN]})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={MUNGE_SOCKET}
CredType=cred/munge
StateSaveLocation={folder}/state
# On the node's own /run: sockets lie in it, whose paths may not be long.
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/cgroup
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=1000,sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# More CPUs and memory than this machine has are taken as given.
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
# A node that was cut off or powered off comes back by itself.
ReturnToService=2
GresTypes=gpu
# Short where the defaults (MessageTimeout 10, UnkillableStepTimeout 60) would make tests wait, and not so short that a
# busy machine is taken for a dead one.
KillWait=30
SlurmdTimeout=15
MessageTimeout=6
TCPTimeout=2
UnkillableStepTimeout=30
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
{settings}
""")
    # Debian's slurmd refuses cgroup v2 on machines that have both, so the version is given.
    (folder / "etc/slurm/cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    gres = f"NodeName={prefix}[0-{len(nodes) - 1}] Name=gpu File={FAKE_GPU}[0-{GPUS - 1}] Flags=nvidia_gpu_env\n"
    (folder / "etc/slurm/gres.conf").write_text("AutoDetect=off\n" + gres)
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(1024))
