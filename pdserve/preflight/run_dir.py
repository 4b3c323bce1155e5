"""Whether a node sees the launcher's run directory: every process there logs into it from its first byte."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from pdserve.preflight.finding import Finding

_MARK_FILE = ".preflight-"
"""In the run directory while the nodes are checked. Its name ends in the mark: two launchers that look at the nodes of
one deployment leave one each."""
_WAIT_SECONDS = 5.0
_POLL_SECONDS = 0.1


def write_mark(run_dir: Path) -> str:
    """Leaves a mark for the nodes; returns what they must find. Raises OSError."""
    mark = secrets.token_hex(8)
    _file(run_dir, mark).touch()
    return mark


def remove_mark(run_dir: Path, mark: str) -> None:
    """After the nodes were checked."""
    _file(run_dir, mark).unlink(missing_ok=True)


def _file(run_dir: Path, mark: str) -> Path:
    return run_dir / f"{_MARK_FILE}{mark}"


def find_run_dir(
    node: str, run_dir: Path, mark: str, *, seconds: float = _WAIT_SECONDS, pause: Callable[[float], None] = time.sleep
) -> Finding:
    """The mark must be there, and the folder writable. It waits a little: a network file system may show a new file
    late."""
    deadline = time.monotonic() + seconds
    while (why := _look(run_dir, mark)) and time.monotonic() < deadline:
        pause(_POLL_SECONDS)
    problem = why or _write(node, run_dir, mark)
    return Finding(
        node=node,
        check="run-dir",
        status="failed" if problem else "ok",
        value=problem or str(run_dir),
        need="the launcher's run directory, shared by all nodes and writable",
        fix="set PDSERVE_HOME to a folder of a shared file system, mounted under the same path on every node (in a "
        "container too)"
        if problem
        else None,
    )


def _look(run_dir: Path, mark: str) -> str | None:
    try:
        _file(run_dir, mark).read_bytes()
    except FileNotFoundError:
        return f"{run_dir} is not the launcher's" if run_dir.is_dir() else f"{run_dir} does not exist here"
    except OSError as error:
        return f"{run_dir} cannot be read: {error.strerror}"
    return None


def _write(node: str, run_dir: Path, mark: str) -> str | None:
    mine = _file(run_dir, f"{mark}-{node}")
    try:
        mine.write_text(node, encoding="utf-8")
    except OSError as error:
        return f"{run_dir} cannot be written: {error.strerror}"
    finally:
        with contextlib.suppress(OSError):
            mine.unlink(missing_ok=True)
    return None
