"""An image that needs no registry: empty folders, into which the host's programs are mounted."""

from __future__ import annotations

import resource
import sys
import tarfile
from io import BytesIO
from pathlib import Path

from tests.launch.deployment import REPOSITORY

IMAGE = "pdserve-test:1"
# docker puts its init into /sbin, which what is mounted must not hide.
_FOLDERS = ("dev", "etc", "proc", "root", "run", "sbin", "sys", "usr", "var")
_OF_THE_SYSTEM = ("bin", "lib", "lib64")


def write_image(file: Path) -> None:
    """A root file system as `docker import` takes it."""
    with tarfile.open(file, "w") as tar:
        for name in _FOLDERS:
            add_folder(tar, name)
        add_folder(tar, "tmp", mode=0o1777)
        for name in _OF_THE_SYSTEM:
            if (host := Path("/", name)).is_symlink():  # into /usr, on every current distribution
                link = tarfile.TarInfo(name)
                link.type, link.linkname = tarfile.SYMTYPE, str(host.readlink())
                tar.addfile(link)
            elif host.exists():
                add_folder(tar, name)


def add_folder(tar: tarfile.TarFile, name: str, *, mode: int = 0o755) -> None:
    """`name` without the slash of the root."""
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, mode
    tar.addfile(entry)


def add_file(tar: tarfile.TarFile, path: str, text: str, *, mode: int = 0o644) -> None:
    """`path` from the root on."""
    entry = tarfile.TarInfo(path[1:])
    entry.size, entry.mode = len(text.encode()), mode
    tar.addfile(entry, BytesIO(text.encode()))


def host_mounts() -> list[str]:
    """For `container.mounts`: the system's programs, the interpreter, its environment and what the tests are made of.
    pdserve's own folder is mounted by pdserve."""
    system = ["/usr", *(f"/{name}" for name in _OF_THE_SYSTEM if Path("/", name).exists() and _is_folder(name))]
    python = [Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve()]
    outside = [str(path) for path in python if not _below(path, *map(Path, system), REPOSITORY)]
    return [f"{path}:{path}:ro" for path in (*system, *outside)]


def limits() -> list[str]:
    """For `container.options`: what this machine's own root has, who may not raise them everywhere."""
    names = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK}
    hard = {name: resource.getrlimit(number)[1] for name, number in names.items()}
    return [f"--ulimit={name}={limit}:{limit}" for name, limit in hard.items()]


def _is_folder(name: str) -> bool:
    return not Path("/", name).is_symlink()


def _below(path: Path, *folders: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)
