"""Deal with the machine below a cluster: what it must have, the packages that are fetched for it, and the names and
cgroups that clusters share.

Slurm, munge and OpenSSH come from the machine's own Debian packages, unpacked into .cache and never installed. apt
reads the machine's configuration and package status, and writes into that folder only. What the packages need and the
machine lacks is fetched with them.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import socket
import string
import subprocess
from contextlib import suppress
from pathlib import Path

from tests.launch.deployment import REPOSITORY, wait_until


class LabError(RuntimeError):
    """This machine lacks something, or a part of the cluster did not come up. The message says which and where."""


CACHE = REPOSITORY / ".cache"
SLURM = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge", "openssh-server", "openssh-client")
_CGROUPS = Path("/sys/fs/cgroup")
_FREEZER = _CGROUPS / "freezer"
_TOOLS = ("unshare", "nsenter", "setpriv", "ip", "bridge", "apt-get", "dpkg-deb")
_FETCH_SECONDS = 600


def check_machine(*, slurm: bool) -> None:
    """Raises LabError with everything that is missing."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if not missing and subprocess.run(["unshare", "-mnpuf", "true"], stderr=subprocess.DEVNULL).returncode:
        missing.append("the right to make namespaces (run as root, in a container with --privileged)")
    if slurm and not os.access(_FREEZER, os.W_OK):
        # With proctrack/linuxproc instead, signals reach other processes than in production.
        missing.append(f"a writable cgroup v1 freezer at {_FREEZER}, by which Slurm 22.05 tracks processes")
    if missing:
        raise LabError("this machine cannot hold a cluster; it lacks " + "; ".join(missing))


def claim_prefix() -> tuple[str, socket.socket]:
    """`pdn` where it is free. The claim holds as long as a process has the socket open, and needs no file."""
    for letter in "n" + string.ascii_lowercase:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with suppress(OSError):
            claim.bind(f"\0pdserve-cluster-pd{letter}")
            return f"pd{letter}", claim
        claim.close()
    raise LabError("26 clusters run on this machine")


def docker_parent(node: str) -> str:
    """Return the cgroup of a node's docker daemon for its containers (--cgroup-parent)."""
    return f"/pdserve-docker-{node}"


def cgroups(prefix: str) -> list[Path]:
    """Return the cgroups of a cluster's nodes, the innermost first."""
    names = (f"slurm_{prefix}[0-9]*", f"pdserve-docker-{prefix}[0-9]*")
    tops = [top for name in names for mounted in ("", "*/") for top in _CGROUPS.glob(mounted + name)]
    return [Path(folder) for top in tops for folder, _, _ in os.walk(top, topdown=False)]


def remove_cgroups(prefix: str) -> None:
    """Removes them as their processes end."""

    def gone() -> bool:
        for folder in cgroups(prefix):
            with suppress(OSError):  # of a container that was killed while it was paused: what is frozen does not die
                (folder / "freezer.state").write_text("THAWED")
            with suppress(OSError):
                folder.rmdir()
        return not cgroups(prefix)

    wait_until(f"the cgroups of {prefix} are gone", gone, 120)


def unpacked(name: str, *packages: str) -> Path:
    """.cache/NAME/root, whose `usr` has these packages, to be laid over /usr. Fetched once; raises LabError."""
    folder = CACHE / name
    root, stamp, system = folder / "root", folder / "packages.txt", platform.freedesktop_os_release()
    wanted = f"{system['ID']} {system.get('VERSION_ID')}: {' '.join(packages)}\n"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (stamp.exists() and stamp.read_text() == wanted):
            for old in (root, folder / "apt"):
                shutil.rmtree(old, ignore_errors=True)
            for package in _download(folder / "apt", packages):
                subprocess.run(["dpkg-deb", "--extract", str(package), str(root)], check=True)
            for program in (root / "usr/sbin").glob("*-wlm"):  # update-alternatives would make these names
                program.with_name(program.name.removesuffix("-wlm")).symlink_to(program.name)
            shutil.rmtree(folder / "apt")
            stamp.write_text(wanted)
    return root


def _download(apt: Path, packages: tuple[str, ...]) -> list[Path]:
    for folder in ("lists", "archives"):
        (apt / folder / "partial").mkdir(parents=True)
    # Hooks of images (docker-clean) delete files outside of our folder.
    hooks = ("APT::Update::Pre-Invoke", "APT::Update::Post-Invoke", "APT::Update::Post-Invoke-Success")
    config = apt / "apt.conf"
    config.write_text(
        "".join(f"#clear {hook};\n" for hook in hooks)
        + f'Dir::Cache "{apt}";\nDir::Cache::archives "{apt}/archives";\nDir::State::lists "{apt}/lists";\n'
        + 'Debug::NoLocking "1";\nAPT::Sandbox::User "root";\nAcquire::Retries "2";\n'
    )
    fetch = ("install", "--download-only", "--reinstall", "--no-install-recommends", "--yes", *packages)
    for arguments in (("update",), fetch):
        argv = ["apt-get", "-q", "-c", str(config), *arguments]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_FETCH_SECONDS, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise LabError(f"{' '.join(argv)} (is there a route to a mirror?):\n{done.stdout}{done.stderr}")
    return sorted((apt / "archives").glob("*.deb"))
