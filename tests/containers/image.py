"""Images that need no registry: empty folders, into which the host's programs are mounted.

One has a stage `engines`, from which a Dockerfile can go on. Nothing can be mounted while an image is built, so that
dockerd is then given a runtime that mounts the host's programs and packages into each of its containers before runc
starts it. What a build installs lies in an environment of the image's own.
"""

from __future__ import annotations

import resource
import shutil
import sys
import tarfile
from pathlib import Path

from tests.launch.deployment import REPOSITORY

IMAGE = "pdserve-test:1"
# docker puts its init into /sbin, which what is mounted must not hide.
_FOLDERS = ("dev", "etc", "proc", "root", "run", "sbin", "sys", "tmp", "usr", "var")
_OF_THE_SYSTEM = ("bin", "lib", "lib64")


def write_image(file: Path, *, engines: Path | None = None) -> None:
    """A root file system as `docker import` takes it. `engines`: the folder of the runtime, for the stage `engines`."""
    root = file.with_suffix(".root")
    for name in _FOLDERS:
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    for name in _OF_THE_SYSTEM:
        if (host := Path("/", name)).is_symlink():  # into /usr, on every current distribution
            (root / name).symlink_to(host.readlink())
        elif host.exists():
            (root / name).mkdir()
    if engines is not None:
        _add_engines(root, engines)
    with tarfile.open(file, "w") as tar:
        tar.add(root, ".")


def host_mounts() -> list[str]:
    """Return the `container.mounts`: the system's programs, the interpreter, its environment and what the tests are
    made of. pdserve's own folder is mounted by pdserve."""
    own = (at for name in _OF_THE_SYSTEM if (at := Path("/", name)).is_dir() and not at.is_symlink())
    system = [Path("/usr"), *own]
    python = [Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve()]
    outside = [path for path in python if not any(map(path.is_relative_to, (*system, REPOSITORY)))]
    return [f"{path}:{path}:ro" for path in (*system, *outside)]


def limits() -> list[str]:
    """Return the `container.options`: what this machine's own root has, who may not raise them everywhere."""
    names = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK}
    hard = {name: resource.getrlimit(number)[1] for name, number in names.items()}
    return [f"--ulimit={name}={limit}:{limit}" for name, limit in hard.items()]


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
    packages = folder / "packages"
    packages.mkdir()
    for entry in (Path(sys.prefix).resolve() / _site_packages()).iterdir():
        if not entry.name.lower().startswith(("pdserve", "_pdserve")):
            (packages / entry.name).symlink_to(entry)
    mounts = [*(mount.split(":")[0] for mount in host_mounts()), str(Path(sys.prefix).resolve()), str(packages)]
    program = folder / "runtime"
    program.write_text(_RUNTIME.format(python=Path(sys.executable).resolve(), mounts=mounts))
    program.chmod(0o755)
    return program


def _add_engines(root: Path, folder: Path) -> None:
    python, home = Path(sys.executable).resolve(), root / HOME[1:]
    for each in (root / "build", home / "bin", home / _site_packages()):
        each.mkdir(parents=True)
    shutil.copy(_LOCK, root / "build")
    for name in ("python", "python3"):
        (home / "bin" / name).symlink_to(python)
    (home / "pyvenv.cfg").write_text(f"home = {python.parent}\nversion = {sys.version.split()[0]}\n")
    pip = home / "bin/pip"
    pip.write_text(f"#!{HOME}/bin/python\nimport sys\nfrom pip._internal.cli.main import main\nsys.exit(main())\n")
    pip.chmod(0o755)
    (home / _site_packages() / "host.pth").write_text(f"{folder / 'packages'}\n")


def changes() -> list[str]:
    """Return options of `docker import`. pip has no index there and takes the build's tools from the environment."""
    settings = {"PATH": f"{HOME}/bin:/usr/bin:/bin", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    return [f"--change=ENV {name}={value}" for name, value in settings.items()]


def _site_packages() -> Path:
    return Path("lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")
