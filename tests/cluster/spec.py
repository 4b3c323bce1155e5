"""Describe a cluster: as data, which the test process writes and the sandbox reads, and as its daemons' files.

The files lie over /etc in the sandbox: Slurm's configuration, and that of ssh and sshd.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

NETWORK = "10.77."
LOGIN = "pdctl"
"""The controller and login node; the switch of the network lives there too."""


@dataclass(frozen=True)
class SlurmSettings:
    """`slurmd_timeout`: seconds after which a silent node is down, 300 by default. `more`: further lines of
    slurm.conf."""

    slurmd_timeout: int = 15
    more: tuple[str, ...] = ()


@dataclass(frozen=True)
class Spec:
    """One cluster. `prefix` + number is a node's name."""

    prefix: str
    count: int
    folder: Path
    packages: Path
    slurm: SlurmSettings | None = field(default_factory=SlurmSettings)
    layers: tuple[Path, ...] = ()
    """Folders whose `usr` is laid over /usr besides `packages`."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the nodes without the login node."""
        return tuple(f"{self.prefix}{index}" for index in range(self.count))

    @property
    def everybody(self) -> tuple[str, ...]:
        return (LOGIN, *self.nodes)

    def address(self, node: str) -> str:
        """10.77.0.1 is the login node, 10.77.0.(10+I) node I."""
        return f"{NETWORK}0.{1 if node == LOGIN else 10 + self.nodes.index(node)}"

    @property
    def etc(self) -> Path:
        """Laid over /etc inside the sandbox."""
        return self.folder / "etc"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def keys(self) -> Path:
        return self.folder / "ssh"

    def write(self) -> None:
        (self.folder / "spec.json").write_text(json.dumps(asdict(self), default=str, indent=1))

    @classmethod
    def read(cls, folder: Path) -> Spec:
        values = json.loads((folder / "spec.json").read_text())
        values |= {name: Path(values[name]) for name in ("folder", "packages")}
        values["layers"] = tuple(map(Path, values["layers"]))
        if (slurm := values["slurm"]) is not None:
            values["slurm"] = SlurmSettings(**slurm | {"more": tuple(slurm["more"])})
        return cls(**values)


GPUS = 8
"""Fake ones of each node."""
FAKE_GPU = "/run/lab/dev/fakegpu"
MUNGE_SOCKET = "/run/lab/munge.socket"


def write_files(spec: Spec) -> None:
    """Makes the cluster's folder anew; logs of the last cluster of that name go."""
    shutil.rmtree(spec.folder, ignore_errors=True)
    for folder in (spec.etc, spec.log, spec.state, spec.keys):
        folder.mkdir(parents=True)
    spec.write()
    _write_etc(spec)
    if spec.slurm is not None:
        _write_slurm(spec, spec.slurm)
    _write_ssh(spec)


def _write_etc(spec: Spec) -> None:
    hosts = ["127.0.0.1 localhost", "::1 localhost ip6-localhost"]
    hosts += [f"{spec.address(node)} {node}" for node in spec.everybody]
    (spec.etc / "hosts").write_text("\n".join(hosts) + "\n")
    passwd = Path("/etc/passwd").read_text()
    if "\nsshd:" not in passwd:  # the user to which sshd drops before a login
        passwd += "sshd:x:109:65534::/run/sshd:/usr/sbin/nologin\n"
    (spec.etc / "passwd").write_text(passwd)
    (spec.etc / "docker").mkdir()  # for who starts a docker daemon on a node: it keeps a key there


def _write_slurm(spec: Spec, slurm: SlurmSettings) -> None:
    folder = spec.etc / "slurm"
    folder.mkdir()
    first, last = spec.nodes[0], spec.count - 1
    assert first.endswith("0")
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={node} NodeAddr={spec.address(node)} CPUs=16 RealMemory=65536 "
        f"Gres=gpu:{GPUS} State=UNKNOWN"
        for node in spec.nodes
    )
    more = "\n".join(slurm.more)
    (folder / "slurm.conf").write_text(f"""\
ClusterName={spec.prefix}
# slurmctld compares it with its own hostname, which is the login node's.
SlurmctldHost={LOGIN}({spec.address(LOGIN)})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={MUNGE_SOCKET}
CredType=cred/munge
StateSaveLocation={spec.state}
# On the node's own /run: sockets lie in it, whose paths may not be long.
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={spec.log}/slurmctld.log
SlurmdLogFile={spec.log}/slurmd-%n.log
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
SlurmdTimeout={slurm.slurmd_timeout}
MessageTimeout=6
TCPTimeout=2
UnkillableStepTimeout=30
{nodes}
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
{more}
""")
    # Debian's slurmd refuses cgroup v2 on machines that have both, so the version is given.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    gres = f"NodeName={spec.prefix}[0-{last}] Name=gpu File={FAKE_GPU}[0-{GPUS - 1}] Flags=nvidia_gpu_env\n"
    (folder / "gres.conf").write_text("AutoDetect=off\n" + gres)
    key = spec.keys / "munge.key"
    key.touch(mode=0o400)
    key.chmod(0o600)
    key.write_bytes(os.urandom(1024))


def _write_ssh(spec: Spec) -> None:
    (spec.keys / "sshd_config").write_text(f"""\
Port 22
AuthorizedKeysFile {spec.keys}/client_key.pub
# The repository's folder may belong to anybody.
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PidFile none
PrintMotd no
MaxStartups 100
LogLevel VERBOSE
Subsystem sftp internal-sftp
""")
    (spec.keys / "config").write_text(f"""\
Host *
  User root
  IdentityFile {spec.keys}/client_key
  IdentitiesOnly yes
  IdentityAgent none
  UserKnownHostsFile {spec.keys}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  BatchMode yes
  ConnectTimeout 5
""")
