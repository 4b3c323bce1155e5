"""`pdserve logs`"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from pdserve.errors import StateError
from pdserve.logs.lines import read_from
from pdserve.logs.rotation import earlier, lost_of
from pdserve.printable import printable
from pdserve.run.directory import RunDir, find, home

_POLL_SECONDS = 0.2
_TAIL_BYTES_A_LINE = 400


def run(process: str | None, name: str | None, *, follow: bool, lines: int) -> None:
    """Raises StateError for a process that the deployment does not have."""
    run_dir = find(home(os.environ), name)
    files = _files(run_dir)
    if process is not None and process not in files:
        raise StateError(f"no log of {process!r}", where=str(run_dir.logs), todo=f"one of: {', '.join(files)}")
    # One that is asked for needs no name before its lines; of those that are followed there may soon be two.
    prefix = process is None and (follow or len(files) > 1)
    offsets = {
        label: _print_tail(label if prefix else "", file, lines)
        for label, file in files.items()
        if process in (None, label)
    }
    if follow:
        # Ends by the signal itself: an exception that Python raises while it tears an iterator down is swallowed, and
        # one Ctrl-C in many thousand would be lost.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    while follow:
        for label, file in _files(run_dir).items():
            if process in (None, label):
                offsets[label] = _print_from(label if prefix else "", file, offsets.get(label, 0))
        sys.stdout.flush()
        time.sleep(_POLL_SECONDS)


def _files(run_dir: RunDir) -> dict[str, Path]:
    return {file.stem.partition("@")[0]: file for file in sorted(run_dir.logs.glob("*.log"))}


def _print_tail(label: str, file: Path, lines: int) -> int:
    size = file.stat().st_size
    wanted = lines * _TAIL_BYTES_A_LINE
    data = read_from(file, max(0, size - wanted), size) or b""
    if len(data) < wanted and (before := earlier(file)).exists():  # it was cut a short while ago
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
        for line in (read_from(earlier(file), offset) or b"").splitlines():
            _print(label, line)
        offset, data = 0, read_from(file, 0) or b""
    whole = data[: data.rfind(b"\n") + 1]
    for line in whole.splitlines():
        _print(label, line)
    return offset + len(whole)


def _print(label: str, line: bytes) -> None:
    text = printable(line.decode(errors="replace"))
    print(f"{label:<12} | {text}" if label else text)
