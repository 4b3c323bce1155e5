"""AIPerf's own environment: a virtual environment in the user's cache folder, made once for each version.

Apart from the clients: `pdserve bench --setup` makes it, and no benchmark does. AIPerf has dozens of pinned packages,
some of which the engines have in other versions: it never shares theirs. A marker file is written last: without it the
environment is half made, and is made anew.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path

from pdserve.errors import PreflightError
from pdserve.logs.lines import end_of, split
from pdserve.system.process import marker, new_token, spawn

VERSION = "0.13.0"
NAME = f"AIPerf {VERSION}"
_COMMIT = "0" * 40


def put_into_cache(folder: Path, cache: Path) -> str:
    """Return the id that `folder` has in `cache`, offline: nothing of it is copied. Raises OSError."""
    # The hub's ids have letters, digits, and single dashes and dots.
    name = re.sub(r"[^A-Za-z0-9]+", "-", folder.resolve().name).strip("-")[:80] or "model"
    entry = cache / f"models--folder--{name}"
    (entry / "snapshots").mkdir(parents=True, mode=0o700)
    (entry / "refs").mkdir(mode=0o700)
    (entry / "refs" / "main").write_text(_COMMIT, encoding="ascii")
    (entry / "snapshots" / _COMMIT).symlink_to(folder.resolve(), target_is_directory=True)
    return f"folder/{name}"


DOWNLOAD = "1.2 GB on disk"
_REQUIREMENTS = "aiperf-requirements.txt"
_MARKER = "complete"
_LOG = "setup.log"
_STOP_SECONDS = 5.0
_LAST_LINES, _LOG_BYTES = 6, 8192

Show = Callable[[str], None]


def requirements() -> Path:
    """Return the pins, as the wheel has them."""
    return Path(str(resources.files("pdserve.bench") / _REQUIREMENTS))


def place(environ: Mapping[str, str], python: str = sys.executable) -> Path:
    """Return the folder of the environment, made or not. The pins and the interpreter it is made with are in its
    name."""
    cache = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    pins = hashlib.sha256(requirements().read_bytes() + str(Path(python).resolve()).encode()).hexdigest()[:8]
    return Path(cache) / "pdserve" / f"aiperf-{VERSION}-{pins}"


def interpreter(folder: Path) -> Path:
    """Return the path of the environment's own Python."""
    return folder / "bin" / "python"


def is_made(folder: Path) -> bool:
    """Return whether the environment was made to its end and the interpreter that it was made with is still there."""
    return (folder / _MARKER).is_file() and os.access(interpreter(folder), os.X_OK)


def installed_interpreter(environ: Mapping[str, str]) -> str:
    """Return the interpreter that has AIPerf. Raises PreflightError when `--setup` has not made it."""
    folder = place(environ)
    if is_made(folder):
        return str(interpreter(folder))
    half = "its environment is half made" if folder.exists() else "it is installed on demand only"
    raise PreflightError(
        f"{NAME} is not installed",
        where=str(folder),
        cause=f"{half}; it never shares the engines' environment",
        todo=f"pdserve bench --setup ({DOWNLOAD}), or --python of an environment that has it",
    )


async def make(environ: Mapping[str, str], show: Show) -> Path:
    """Make AIPerf's environment, unless it is there, and return its folder. Raises PreflightError."""
    folder = place(environ)
    if is_made(folder):
        show(f"{NAME} is installed: {folder} (to make it anew, remove this folder)")
        return folder
    log = folder.with_name(f"{folder.name}.{_LOG}")
    show(f"{NAME} gets an environment of its own ({DOWNLOAD}), which takes minutes: {folder}")
    show(f"what pip says: {log}")
    pip = [str(interpreter(folder)), "-I", "-m", "pip", "install", "--progress-bar", "off"]
    await _step([sys.executable, "-I", "-m", "venv", "--clear", str(folder)], environ, log)
    await _step([*pip, "--disable-pip-version-check", "-r", str(requirements())], environ, log)
    (folder / _MARKER).write_text(f"{VERSION}\n")
    show(f"{NAME} is installed")
    return folder


async def _step(argv: list[str], environ: Mapping[str, str], log: Path) -> None:
    """Run one program, without what leads to packages of ours. Raises PreflightError."""
    ours = ("PYTHON", "PDSERVE_", "VIRTUAL_ENV")
    env = {name: value for name, value in environ.items() if not name.startswith(ours)}
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        child = spawn(argv, env=env, log=log, marker=marker("setup", new_token(), "setup"), control_stdin=False)
    except OSError as error:
        raise PreflightError(
            f"{NAME} could not be installed: {argv[0]} cannot be started",
            where=str(log),
            cause=error.strerror or str(error),
            todo="another folder: XDG_CACHE_HOME",
        ) from error
    try:
        ended = await child.wait()
    finally:
        await child.stop(_STOP_SECONDS)
    if ended.code != 0:
        raise PreflightError(
            f"{NAME} could not be installed: {Path(argv[0]).name} {ended}",
            where=str(log),
            cause="the last lines of its log say why",
            todo="correct it and run pdserve bench --setup again; pip.conf and PIP_INDEX_URL choose the package index",
            evidence=tuple(split(end_of(log, _LOG_BYTES))[-_LAST_LINES:]),
        )
