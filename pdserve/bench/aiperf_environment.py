"""AIPerf's own environment: a virtual environment in the user's cache folder, made once for each version.

Apart from the clients: `pdserve bench --setup` makes it, and no benchmark does. AIPerf has dozens of pinned packages,
some of which the engines have in other versions: it never shares theirs. A marker file is written last: without it the
environment is half made, and is made anew.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

from pdserve.errors import PreflightError
from pdserve.logs.lines import end_of, split
from pdserve.printable import size_text
from pdserve.system.process import Exit, marker, new_token, output_of, spawn

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


NEEDED_BYTES = 2 * 2**30
"""1.2 GB installed, and what is downloaded stays in pip's own cache until then."""
DOWNLOAD = "1.2 GB on disk"
_REQUIREMENTS = "aiperf-requirements.txt"
_MARKER = "complete"
_LOG = "setup.log"
_LOOK_SECONDS = 0.5
_CHECK_SECONDS = 120.0
_STOP_SECONDS = 5.0
_LAST_LINES, _LOG_BYTES = 6, 8192
_PACKAGE = re.compile(r"(?:Collecting|Processing) (?:\S*/)?(\S+)")
_INSTALLING = "Installing collected packages"
_CAUSES = (
    ("No space left on device", "the disk is full"),
    ("No matching distribution", "the package index does not have a pinned version for this Python"),
    ("Failed to establish a new connection", "the package index cannot be reached"),
    ("Temporary failure in name resolution", "the package index cannot be reached"),
    ("Read timed out", "the package index did not answer in time"),
    ("ensurepip", "this Python cannot make virtual environments (Debian: apt-get install python3-venv)"),
    ("Permission denied", "the folder is not yours"),
)

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
    with hold_alone(folder):
        if is_made(folder) and (version := _version(folder, environ)) == VERSION:
            show(f"{NAME} is installed: {folder}")
            return folder
        if folder.exists():
            show(f"what is in {folder} is not whole: it is made anew")
            _remove(folder)
        _room(folder)
        show(f"{NAME} gets an environment of its own ({DOWNLOAD}): {folder}")
        env = _environment(environ)
        log = folder.with_name(f"{folder.name}.{_LOG}")
        log.unlink(missing_ok=True)
        await _step([sys.executable, "-I", "-m", "venv", str(folder)], env, log, show)
        pip = [str(interpreter(folder)), "-I", "-m", "pip", "install", "--progress-bar", "off"]
        await _step([*pip, "--disable-pip-version-check", "-r", str(requirements())], env, log, show)
        if (version := _version(folder, environ)) != VERSION:
            raise _failed(f"{NAME} was installed and does not answer", log, f"its version is {version or 'not known'}")
        (folder / _MARKER).write_text(f"{VERSION}\n")
        show(f"{NAME} is installed")
        return folder


async def _step(argv: list[str], env: Mapping[str, str], log: Path, show: Show) -> None:
    """Run one program, with a line for each thing that it does. Raises PreflightError."""
    try:
        child = spawn(argv, env=env, log=log, marker=marker("setup", new_token(), "setup"), control_stdin=False)
    except OSError as error:
        raise _failed(f"{argv[0]} cannot be started", log, error.strerror or str(error)) from error
    waiting = asyncio.create_task(child.wait())
    progress = _Progress(log, show)
    try:
        while not waiting.done():
            await asyncio.wait({waiting}, timeout=_LOOK_SECONDS)
            progress.look()
    finally:
        waiting.cancel()
        await child.stop(_STOP_SECONDS)
    ended: Exit = waiting.result()
    if ended.code != 0:
        raise _failed(f"{NAME} could not be installed: {Path(argv[0]).name} {ended}", log, _cause(log))


class _Progress:
    """Turns what pip writes into a line for each package."""

    def __init__(self, log: Path, show: Show) -> None:
        self._log = log
        self._show = show
        self._read = 0
        self._packages = 0
        self._all = sum(line[:1].isalnum() for line in requirements().read_text().splitlines())

    def look(self) -> None:
        """Shows what is new, by whole lines."""
        with self._log.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            if package := _PACKAGE.match(line):
                self._packages += 1
                self._show(f"package {self._packages} of {self._all}: {package.group(1)}")
            elif line.startswith(_INSTALLING):
                self._show("all packages are here; installing them")


def _cause(log: Path) -> str:
    text = end_of(log, _LOG_BYTES).decode(errors="replace")
    return next((cause for sign, cause in _CAUSES if sign in text), "the log has it")


def _failed(what: str, log: Path, cause: str) -> PreflightError:
    return PreflightError(
        what,
        where=str(log),
        cause=cause,
        todo="correct it and run pdserve bench --setup again; pip.conf and PIP_INDEX_URL choose the package index",
        evidence=tuple(split(end_of(log, _LOG_BYTES))[-_LAST_LINES:]) if log.exists() else (),
    )


def _version(folder: Path, environ: Mapping[str, str]) -> str | None:
    """Return the version that the environment itself reports once it has imported all that AIPerf does: a package that
    is missing is seen here."""
    program = "import importlib.metadata, aiperf.cli; print(importlib.metadata.version('aiperf'))"
    output = output_of(
        [str(interpreter(folder)), "-I", "-c", program], timeout=_CHECK_SECONDS, environ=_environment(environ)
    )
    return output.out.strip() if output.code == 0 else None


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return our environment, without what leads to packages of ours."""
    return {
        name: value for name, value in environ.items() if not name.startswith(("PYTHON", "PDSERVE_", "VIRTUAL_ENV"))
    }


def _room(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if free < NEEDED_BYTES:
        raise PreflightError(
            f"there is no room for {NAME}",
            where=str(folder.parent),
            cause=f"{size_text(free)} are free, and {size_text(NEEDED_BYTES)} are needed",
            todo="make room there, or choose another folder: XDG_CACHE_HOME",
        )


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise PreflightError(
            "what is left of an environment cannot be removed",
            where=str(folder),
            cause=error.strerror or str(error),
            todo="remove it by hand",
        ) from error


@contextmanager
def hold_alone(folder: Path) -> Iterator[None]:
    """Hold the lock of a set-up. Two set-ups at once would make half an environment each. Raises PreflightError."""
    lock = folder.with_name(f"{folder.name}.lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise PreflightError(
            f"there is no place for {NAME}",
            where=str(lock.parent),
            cause=error.strerror or str(error),
            todo="another folder: XDG_CACHE_HOME",
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise PreflightError(
            f"another pdserve installs {NAME} now", where=str(folder), todo="wait until it is ready"
        ) from None
    finally:
        os.close(descriptor)
