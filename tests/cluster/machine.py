"""Deal with the machine below a cluster: what it must have, the packages that are fetched for it, and the names and
cgroups that clusters share.

Slurm, munge and OpenSSH come from the machine's own Debian packages, unpacked into .cache/cluster and never installed.
apt reads the machine's configuration and package status, and writes into that folder only. What the packages need and
the machine lacks is fetched with them.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import string
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path


class LabError(RuntimeError):
    """This machine lacks something, or a part of the cluster did not come up. The message says which and where."""


FREEZER = Path("/sys/fs/cgroup/freezer")
UNIFIED = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
"""Where cgroup v2 is, beside v1 or alone."""
_CAPABILITIES = {"CAP_SYS_ADMIN": 21, "CAP_NET_ADMIN": 12, "CAP_MKNOD": 27}
_TOOLS = {
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "ip": "iproute2",
    "bridge": "iproute2",
    "ss": "iproute2",
}


def check_machine(*, slurm: bool) -> None:
    """Raises LabError with everything that is missing."""
    missing = [f"{tool} (package {package})" for tool, package in _TOOLS.items() if shutil.which(tool) is None]
    missing += [f"{name} (run as root, in a container with --privileged)" for name in _lacking()]
    if slurm and not os.access(FREEZER, os.W_OK):
        # With proctrack/linuxproc instead, signals reach other processes than in production.
        missing.append(f"a writable cgroup v1 freezer at {FREEZER}, by which Slurm 22.05 tracks processes")
    if missing:
        raise LabError("this machine cannot hold a cluster; it lacks " + "; ".join(missing))


def _lacking() -> list[str]:
    status = Path("/proc/self/status").read_text()
    lines = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    effective = int(lines["CapEff"], 16)
    return [name for name, bit in _CAPABILITIES.items() if not effective >> bit & 1]


def claim_prefix() -> tuple[str, socket.socket]:
    """`pdn` where it is free. The claim holds as long as a process has the socket open, and needs no file."""
    for letter in "n" + string.ascii_lowercase.replace("n", ""):
        prefix = f"pd{letter}"
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0pdserve-cluster-{prefix}")
        except OSError:
            claim.close()
        else:
            return prefix, claim
    raise LabError("26 clusters run on this machine")


_GONE_SECONDS = 120.0
_DOCKER = "pdserve-docker-"


def docker_parent(node: str) -> str:
    """Return the cgroup of a node's docker daemon for its containers (--cgroup-parent)."""
    return f"/{_DOCKER}{node}"


def cgroups(prefix: str) -> list[Path]:
    """Return the cgroups of a cluster's nodes, the innermost first."""
    folders: list[Path] = []
    agents = [top for mount in UNIFIED for top in mount.glob(f"pdserve-*@{prefix}[0-9]*")]
    mounts = [*UNIFIED, *(folder for folder in FREEZER.parent.iterdir() if folder.is_dir())]
    containers = [top for mount in mounts for top in mount.glob(f"{_DOCKER}{prefix}[0-9]*")]
    for top in (*FREEZER.glob(f"slurm_{prefix}[0-9]*"), *agents, *containers):
        folders += [Path(folder) for folder, _, _ in os.walk(top, topdown=False)]
    return folders


def remove_cgroups(prefix: str) -> None:
    """Removes them as their processes end; raises OSError when some are still held after two minutes."""
    deadline = time.monotonic() + _GONE_SECONDS
    while left := cgroups(prefix):
        _thaw(left)
        for folder in left:
            try:
                folder.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
                break


def _thaw(folders: list[Path]) -> None:
    """Thaw a container that a test has paused and that was killed since: what is frozen does not die."""
    for folder in folders:
        with suppress(FileNotFoundError):
            if folder.is_relative_to(FREEZER):
                (folder / "freezer.state").write_text("THAWED")


CACHE = Path(__file__).resolve().parents[2] / ".cache" / "cluster"
_FETCH_SECONDS = 300


@dataclass(frozen=True)
class PackageSet:
    """Packages that are unpacked into one folder."""

    names: tuple[str, ...]
    programs: tuple[str, ...]
    """Below /usr; there must be each of them, in the folder or on the machine."""
    alternatives: tuple[str, ...] = ()
    """Named NAME-wlm in the packages; update-alternatives would make the names."""


SLURM = PackageSet(
    (
        "slurmctld",
        "slurmd",
        "slurm-client",
        "slurm-wlm-basic-plugins",
        "munge",
        "openssh-server",
        "openssh-client",
    ),
    programs=("sbin/slurmctld", "sbin/slurmd", "sbin/munged", "sbin/sshd", "bin/srun", "bin/ssh"),
    alternatives=("slurmctld", "slurmd", "slurmstepd"),
)


def unpacked(cache: Path = CACHE, wanted: PackageSet = SLURM) -> Path:
    """The folder whose `usr` has them, to be laid over /usr. Fetched once; raises LabError without a route."""
    root, stamp = cache / "root", cache / "packages.txt"
    key = _key(wanted)
    with _alone(cache):
        if not (stamp.exists() and stamp.read_text().startswith(key)):
            versions = _unpack(_download(cache / "apt", wanted), root, wanted)
            shutil.rmtree(cache / "apt")
            stamp.write_text(key + "".join(f"{version}\n" for version in versions))
    return root


def _key(wanted: PackageSet) -> str:
    """Return for which packages and which system the folder was filled."""
    release = Path("/etc/os-release")
    system = [line for line in release.read_text().splitlines() if line.startswith(("ID=", "VERSION_ID="))]
    return f"# {' '.join(sorted(system))}: {' '.join(wanted.names)}\n"


@contextmanager
def _alone(cache: Path) -> Iterator[None]:
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _download(apt: Path, wanted: PackageSet) -> list[Path]:
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise LabError(f"{tool} is missing: {', '.join(wanted.names)} come from Debian's packages")
    names, runs = wanted.names, []
    # The machine's own lists are used as they are; where they are missing or stale, lists of our own are made.
    for private_lists in (False, True):
        config = _apt_config(apt, private_lists=private_lists)
        if private_lists:
            runs.append(_apt(config, "update"))
        shutil.rmtree(apt / "archives", ignore_errors=True)
        (apt / "archives" / "partial").mkdir(parents=True)
        runs.append(_apt(config, "install", "--download-only", "--no-install-recommends", "--yes", *names))
        packages = sorted((apt / "archives").glob("*.deb"))
        if packages and runs[-1].returncode == 0:
            return packages
        if runs[-1].returncode == 0:
            raise LabError(f"nothing to fetch: {' '.join(names)} are installed here, which is not supported")
    text = "\n".join(f"$ {' '.join(run.args)}\n{(run.stdout + run.stderr).strip()}" for run in runs)
    raise LabError(f"the packages {' '.join(names)} could not be fetched (is there a route to a mirror?):\n{text}")


def _apt_config(apt: Path, *, private_lists: bool) -> Path:
    """Read by apt after the machine's own configuration."""
    (apt / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    hooks = ("APT::Update::Pre-Invoke", "APT::Update::Post-Invoke", "APT::Update::Post-Invoke-Success")
    lines = [
        # Hooks of images (docker-clean) delete files outside of our folder.
        *(f"#clear {hook};" for hook in hooks),
        f'Dir::Cache "{apt}";',
        f'Dir::Cache::archives "{apt}/archives";',
        'Debug::NoLocking "1";',
        'APT::Sandbox::User "root";',
        'Acquire::Retries "2";',
        'Acquire::http::Timeout "20";',
        'Acquire::https::Timeout "20";',
    ]
    if private_lists:
        lines.append(f'Dir::State::lists "{apt}/lists";')
    path = apt / "apt.conf"
    path.write_text("\n".join(lines) + "\n")
    return path


def _apt(config: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = ["apt-get", "-q", "-c", str(config), *arguments]
    environment = os.environ | {"LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        return subprocess.run(
            argv, capture_output=True, text=True, timeout=_FETCH_SECONDS, stdin=subprocess.DEVNULL, env=environment
        )
    except subprocess.TimeoutExpired as error:
        raise LabError(f"{' '.join(argv)} did not end within {_FETCH_SECONDS} s") from error


def _unpack(packages: list[Path], root: Path, wanted: PackageSet) -> list[str]:
    """Fills `root` anew. Returns `name version` of each package."""
    partial = root.with_name("root.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    versions = []
    for package in packages:
        subprocess.run(["dpkg-deb", "--extract", str(package), str(partial)], check=True)
        shown = subprocess.run(
            ["dpkg-deb", "--show", "--showformat=${Package} ${Version}", str(package)],
            check=True,
            capture_output=True,
            text=True,
        )
        versions.append(shown.stdout)
    for name in wanted.alternatives:
        (partial / "usr" / "sbin" / name).symlink_to(f"{name}-wlm")
    there = (partial / "usr", Path("/usr"))
    missing = [name for name in wanted.programs if not any((usr / name).exists() for usr in there)]
    if missing:
        raise LabError(f"the packages have no {', '.join(missing)}: {'; '.join(versions)}")
    shutil.rmtree(root, ignore_errors=True)
    partial.rename(root)
    return versions
