"""The history of a run, one JSON object a line: events.jsonl, and what was before it in events.jsonl.1.

It has one writer, who opens it for each line: a full one is renamed, not copied as a log is (logs/rotation.py), which
needs no room on a full disk. The first line of the next one has how much was before it, so that a reader with an offset
from the beginning of the history finds its place, however late it comes.

`incident` names the events that disturb what is measured or proven meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from pdserve.logs.lines import read_from
from pdserve.logs.rotation import rotated_log

_FULL_BYTES = 8 << 20
"""Tens of thousands of events. The report of a failure reads all that is kept, twice as much."""
_CONTINUED = re.compile(rb'\{"at": [0-9.]+, "event": "continued", "bytes_before": ([0-9]+)\}\n')
_HEAD_BYTES = 120
_LAST_TIME = 1 << 36
"""Seconds: no clock of ours is in the year 4147."""
_SHOWN_BYTES = 200
"""Of a line that cannot be read."""


def append(file: Path, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Adds an event and returns it. `at` is wall-clock seconds. Raises OSError when it cannot be written whole; nothing
    of it is left then."""
    with contextlib.suppress(FileNotFoundError):
        if file.stat().st_size >= _FULL_BYTES:
            file.rename(rotated_log(file))
    event = {"at": round(time.time(), 3), "event": kind, **fields}
    line = json.dumps(event).encode() + b"\n"
    with file.open("ab+", buffering=0) as stream:
        size = stream.seek(0, os.SEEK_END)
        if not size and rotated_log(file).exists():
            line = _continuation_line(rotated_log(file), event["at"]) + line
        if size and os.pread(stream.fileno(), 1, size - 1) != b"\n":
            line = b"\n" + line  # half a line of a writer that was killed, or had no space
        try:
            written = stream.write(line)
        except OSError:
            written = 0
        if written != len(line):
            stream.truncate(size)
            raise OSError(errno.ENOSPC, "the event could not be written whole", str(file))
    return event


def read(file: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Return the events of whole lines from a byte of the history on, as far as they are kept, and the offset to go on
    from. A line that cannot be read is an event "unreadable" with its beginning as `text`: the others still count."""
    base = _bytes_before(file)
    start = max(0, offset - base)
    data = read_from(file, start)
    if data is None:  # a history that was deleted, and has begun again
        start, data = 0, read_from(file, 0) or b""
    lines = data[: data.rfind(b"\n") + 1]
    cut_off = b""
    if offset < base:
        cut_off = read_from(rotated_log(file), max(0, offset - _bytes_before(rotated_log(file)))) or b""
        cut_off = cut_off[: cut_off.rfind(b"\n") + 1]
    events: list[dict[str, Any]] = []
    for line in (cut_off + lines).split(b"\n")[:-1]:
        events.append(_event(line, events[-1]["at"] if events else 0.0))
    return events, base + start + len(lines)


def _continuation_line(before: Path, at: float) -> bytes:
    count = _bytes_before(before) + before.stat().st_size
    return json.dumps({"at": at, "event": "continued", "bytes_before": count}).encode() + b"\n"


def _bytes_before(file: Path) -> int:
    """Return the bytes of the history that were before this file; 0 where it has none, or does not record it."""
    match = _CONTINUED.match(read_from(file, 0, _HEAD_BYTES) or b"")
    return 0 if match is None else int(match[1])


def _event(line: bytes, at: float) -> dict[str, Any]:
    """Read an event. `at`: the time of the event before, for a line that cannot be read."""
    try:
        event = from_json(line)
    except ValueError:  # also of what is nested too deeply, or is not UTF-8
        event = None
    if isinstance(event, dict) and isinstance(event.get("event"), str):
        time_of = event.get("at")
        if isinstance(time_of, int | float) and 0 <= time_of < _LAST_TIME:  # NaN is not
            return event
    return {"at": at, "event": "unreadable", "text": line[:_SHOWN_BYTES].decode(errors="replace")}


INCIDENTS: Mapping[str, str] = {
    "died": "died",
    "late": "was not ready in time",
    "given_up": "did not answer and counts as dead",
    "restarting": "is being restarted",
    "bad_peer": "exchanged no KV with a new engine",
    "cache_down": "is down",
    "engine_not_back": "did not attach to its cache server again",
    "unresponsive": "did not answer",
    "out_of_sockets": "ran out of sockets or file descriptors",
    "agent_gone": "lost its agent",
    "failed": "failed",
}
"""Event -> what happened to the process or node that it names."""


def incident(event: Mapping[str, Any]) -> str | None:
    """Return what went wrong, by an event of the history; None: nothing did. What names no process is the
    deployment's."""
    what = INCIDENTS.get(event["event"])
    return None if what is None else f"{event.get('name') or event.get('node') or 'the deployment'} {what}"
