"""`pdserve logs`"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from pdserve.errors import StateError
from pdserve.logs.lines import read_from
from pdserve.logs.rotation import lost_of, rotated_log
from pdserve.printable import printable
from pdserve.run.directory import RunDir, find, home

_POLL_SECONDS = 0.2
_TAIL_BYTES_A_LINE = 400


def run(process: str | None, name: str | None, *, follow: bool, lines: int) -> None:
    """Print the logs of a deployment, or of one process of it. Raises StateError for a process that it does not
    have."""
    run_dir = find(home(os.environ), name)
    files = _files(run_dir, process)
    if process is not None and not files:
        known = ", ".join(_files(run_dir, None).values())
        raise StateError(f"no log of {process!r}", where=str(run_dir.logs), todo=f"one of: {known}")
    # One that is asked for needs no name before its lines; of those that are followed there may soon be two.
    prefix = len(files) > 1 or (follow and process is None)
    offsets = {file: _print_tail(label if prefix else "", file, lines) for file, label in files.items()}
    while follow:
        for file, label in _files(run_dir, process).items():
            offsets[file] = _print_from(label if prefix else "", file, offsets.get(file, 0))
        sys.stdout.flush()
        time.sleep(_POLL_SECONDS)


def _files(run_dir: RunDir, process: str | None) -> dict[Path, str]:
    """Return the logs and their labels: the process, with its node where several nodes have one of that name
    (agents)."""
    files = sorted(run_dir.logs.glob("*.log"))
    names = [file.stem.partition("@")[0] for file in files]
    labels = {file: name if names.count(name) == 1 else file.stem for file, name in zip(files, names, strict=True)}
    return {file: label for file, label in labels.items() if process in (None, label, label.partition("@")[0])}


def _print_tail(label: str, file: Path, lines: int) -> int:
    size = file.stat().st_size
    wanted = lines * _TAIL_BYTES_A_LINE
    data = read_from(file, max(0, size - wanted), size) or b""
    if len(data) < wanted and (before := rotated_log(file)).exists():  # it was cut a short while ago
        data = (read_from(before, max(0, before.stat().st_size - wanted + len(data))) or b"") + data
    tail = data.splitlines()
    for line in tail[len(tail) - min(lines, len(tail)) :]:
        _print(label, line)
    return size


def _print_from(label: str, file: Path, offset: int) -> int:
    data = read_from(file, offset)
    if data is None and (cut := lost_of(file)) is not None:
        offset = cut.now_at(offset)
        data = read_from(file, offset)
    if data is None:
        for line in (read_from(rotated_log(file), offset) or b"").splitlines():
            _print(label, line)
        offset, data = 0, read_from(file, 0) or b""
    whole = data[: data.rfind(b"\n") + 1]
    for line in whole.splitlines():
        _print(label, line)
    return offset + len(whole)


def _print(label: str, line: bytes) -> None:
    text = printable(line.decode(errors="replace"))
    print(f"{label:<12} | {text}" if label else text)
