"""Whether a node sees the launcher's run directory: every process there logs into it from its first byte."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from pdserve.preflight.finding import Finding

MARK_FILE = ".preflight"
"""In the run directory while the nodes are checked."""
_WAIT_SECONDS = 5.0
_POLL_SECONDS = 0.1


def write_mark(run_dir: Path) -> str:
    """Leaves a mark for the nodes; returns what they must find. Raises OSError."""
    mark = secrets.token_hex(8)
    (run_dir / MARK_FILE).write_text(mark)
    return mark


def remove_mark(run_dir: Path) -> None:
    """After the nodes were checked."""
    (run_dir / MARK_FILE).unlink(missing_ok=True)


def find_run_dir(
    node: str, run_dir: Path, mark: str, *, seconds: float = _WAIT_SECONDS, pause: Callable[[float], None] = time.sleep
) -> Finding:
    """The mark must be there, and the folder writable. It waits a little: a network file system may show a new file
    late."""
    deadline = time.monotonic() + seconds
    while (why := _look(run_dir, mark)) and time.monotonic() < deadline:
        pause(_POLL_SECONDS)
    problem = why or _write(node, run_dir)
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
        found = (run_dir / MARK_FILE).read_text()
    except FileNotFoundError:
        return f"{run_dir} is not the launcher's" if run_dir.is_dir() else f"{run_dir} does not exist here"
    except OSError as error:
        return f"{run_dir} cannot be read: {error.strerror}"
    return None if found == mark else f"{run_dir} is not the launcher's"


def _write(node: str, run_dir: Path) -> str | None:
    mine = run_dir / f"{MARK_FILE}-{node}"
    try:
        mine.write_text(node)
    except OSError as error:
        return f"{run_dir} cannot be written: {error.strerror}"
    finally:
        with contextlib.suppress(OSError):
            mine.unlink(missing_ok=True)
    return None
