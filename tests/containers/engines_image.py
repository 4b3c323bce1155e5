"""A stage `engines` for the Dockerfiles without a registry: the host's programs and packages, as if an image had them.

Nothing can be mounted while an image is built, so that dockerd is given a runtime that mounts them into each of its
containers before runc starts it. What a build installs lies in an environment of the image's own.
"""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path

from tests.containers.image import add_file, add_folder, host_mounts, write_image
from tests.launch.deployment import REPOSITORY

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
    for entry in (Path(sys.prefix).resolve() / _packages()).iterdir():
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
        add_file(tar, f"{HOME}/{_packages()}/host.pth", f"{_folder_of_packages(folder)}\n")


def changes() -> list[str]:
    """For `docker import`. pip has no index there and takes the build's tools from the environment."""
    settings = {"PATH": f"{HOME}/bin:/usr/bin:/bin", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    return [f"--change=ENV {name}={value}" for name, value in settings.items()]


def _packages() -> Path:
    return Path("lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")


def _folder_of_packages(folder: Path) -> Path:
    packages = folder / "packages"
    packages.mkdir(exist_ok=True)
    return packages
