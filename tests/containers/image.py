"""Images that need no registry: empty folders, into which the host's programs are mounted.

One has a stage `engines`, from which a Dockerfile can go on. Nothing can be mounted while an image is built, so that
dockerd is then given a runtime that mounts the host's programs and packages into each of its containers before runc
starts it. What a build installs lies in an environment of the image's own.
"""

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
    """Return the `container.mounts`: the system's programs, the interpreter, its environment and what the tests are
    made of. pdserve's own folder is mounted by pdserve."""
    system = ["/usr", *(f"/{name}" for name in _OF_THE_SYSTEM if Path("/", name).exists() and _is_folder(name))]
    python = [Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve()]
    outside = [str(path) for path in python if not _below(path, *map(Path, system), REPOSITORY)]
    return [f"{path}:{path}:ro" for path in (*system, *outside)]


def limits() -> list[str]:
    """Return the `container.options`: what this machine's own root has, who may not raise them everywhere."""
    names = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK}
    hard = {name: resource.getrlimit(number)[1] for name, number in names.items()}
    return [f"--ulimit={name}={limit}:{limit}" for name, limit in hard.items()]


def _is_folder(name: str) -> bool:
    return not Path("/", name).is_symlink()


def _below(path: Path, *folders: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


_LOCK = REPOSITORY / "requirements" / "cpu-stack.lock.txt"
"""The stage before leaves it for the last one."""
HOME = "/opt/engines"
"""Of the image's own Python environment."""
_RUNTIME = """#!{python}
import json, os, sys

if "create" in sys.argv:
    file = os.path.join(sys.argv[sys.argv.index("--bundle") + 1], "config.json")
    with open(file) as text:
        container = json.load(text)
    for path in {mounts!r}:
        container["mounts"].append(dict(destination=path, source=path, type="bind", options=["rbind", "ro"]))
    with open(file, "w") as text:
        json.dump(container, text)
os.execvp("runc", ["runc", *sys.argv[1:]])
"""


def write_runtime(folder: Path) -> Path:
    """The program for dockerd's `--add-runtime`; `folder` gets all packages of this environment but pdserve."""
    packages = _folder_of_packages(folder)
    for entry in (Path(sys.prefix).resolve() / _site_packages()).iterdir():
        if not entry.name.lower().startswith(("pdserve", "_pdserve")):
            (packages / entry.name).symlink_to(entry)
    mounts = [*(mount.split(":")[0] for mount in host_mounts()), str(Path(sys.prefix).resolve()), str(packages)]
    program = folder / "runtime"
    program.write_text(_RUNTIME.format(python=Path(sys.executable).resolve(), mounts=mounts))
    program.chmod(0o755)
    return program


def write_engines_image(file: Path, folder: Path) -> None:
    """A root file system as `docker import` takes it; `folder`: that of the runtime."""
    write_image(file)
    python = Path(sys.executable).resolve()
    with tarfile.open(file, "a") as tar:
        add_folder(tar, "build")
        add_file(tar, f"/build/{_LOCK.name}", _LOCK.read_text())
        for name in ("opt", HOME[1:], f"{HOME}/bin"[1:], f"{HOME}/lib"[1:]):
            add_folder(tar, name)
        for name in ("python", "python3"):
            link = tarfile.TarInfo(f"{HOME}/bin/{name}"[1:])
            link.type, link.linkname = tarfile.SYMTYPE, str(python)
            tar.addfile(link)
        add_file(tar, f"{HOME}/pyvenv.cfg", f"home = {python.parent}\nversion = {sys.version.split()[0]}\n")
        pip = f"#!{HOME}/bin/python\nimport sys\nfrom pip._internal.cli.main import main\nsys.exit(main())\n"
        add_file(tar, f"{HOME}/bin/pip", pip, mode=0o755)
        add_file(tar, f"{HOME}/{_site_packages()}/host.pth", f"{_folder_of_packages(folder)}\n")


def changes() -> list[str]:
    """Return options of `docker import`. pip has no index there and takes the build's tools from the environment."""
    settings = {"PATH": f"{HOME}/bin:/usr/bin:/bin", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    return [f"--change=ENV {name}={value}" for name, value in settings.items()]


def _site_packages() -> Path:
    return Path("lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")


def _folder_of_packages(folder: Path) -> Path:
    packages = folder / "packages"
    packages.mkdir(exist_ok=True)
    return packages
