"""Read log lines of vLLM, LMCache and uvicorn: what they have in common, a log that grows, and its last lines."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from pdserve.logs.rotation import rotated_log

LINE_CHARACTERS = 2000
"""Of a line that is searched: patterns over a line of any length would take any time."""
_STEP_BYTES = 256 * 1024
_UNFINISHED_BYTES = 4 * LINE_CHARACTERS  # UTF-8 has at most four a character

_COLOR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PREFIX = re.compile(r"^\((?P<who>[\w.-]+(?: [\w.-]+)*) pid=\d+\) ")
_HARMLESS = re.compile(
    r"^(?:\([^)]*pid=\d+\) )?(?:INFO|WARNING|DEBUG)\b"  # vLLM, uvicorn
    r"|^(?:\([^)]*pid=\d+\) )?ERROR .{0,40}\[(?:[\w/.]+/)?dump_input\.py:\d+\] "  # what ran at a failed step
    r"|\bLMCache (?:INFO|WARNING|DEBUG):"
    r"|^\S+\.py:\d+: \w*Warning: "  # the warnings module
    r"|\bNCCL INFO\b"  # NCCL and RCCL: also what they look for and do not need
    r"|^(?:\([^)]*pid=\d+\) )?(?:\[rank\d+\]:)?\[[IW]\d{4} "  # torch: it warns of what it tries again
    r"|^[IW]\d{4} \d\d:\d\d"  # Mooncake (glog): it logs W for "no RDMA devices" and goes on over TCP
)


def plain_line(line: str) -> str:
    """Return the first LINE_CHARACTERS, without colours, and what a progress bar wrote last of what it wrote over."""
    text = _COLOR.sub("", line[:LINE_CHARACTERS]).rstrip("\r\n")
    return text.rsplit("\r", 1)[-1]


def message(line: str) -> str:
    """Return a line as `plain_line` does, without vLLM's `(EngineCore pid=12) `."""
    return _PREFIX.sub("", plain_line(line))


def may_name_cause(line: str) -> bool:
    """Return whether a plain line can be about a failure: INFO and WARNING mention errors that did not happen."""
    return not _HARMLESS.search(line[:LINE_CHARACTERS])


class GrowingLog:
    """A log that another process writes, in bounded steps: whatever is in it, a step takes a bounded time."""

    def __init__(self, file: Path, offset: int) -> None:
        """Begin to read a log. `offset`: the byte at which to begin."""
        self._file = file
        self._offset = offset
        self._unfinished = b""
        self.behind = False
        """The last step did not reach the end of the file."""

    def step(self) -> list[str]:
        """Return the lines that were finished since the last step, each cut to LINE_CHARACTERS; progress bars (\\r)
        count as lines. Nothing is read twice, and of a line that does not end only the beginning is kept."""
        data = self._read_step()
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not end:
            self._unfinished = (self._unfinished + data)[:_UNFINISHED_BYTES]
            return []
        finished = split(self._unfinished + data[:end])
        self._unfinished = data[end:][:_UNFINISHED_BYTES]
        return finished

    def _read_step(self) -> bytes:
        data = read_from(self._file, self._offset, _STEP_BYTES)
        was_cut = data is None
        if data is None:
            data = read_from(rotated_log(self._file), self._offset, _STEP_BYTES) or b""
        self._offset = 0 if was_cut and not data else self._offset + len(data)
        self.behind = was_cut or len(data) == _STEP_BYTES
        return data


def read_from(file: Path, offset: int, limit: int = -1) -> bytes | None:
    """Return what stands in a log from a byte on, nothing where there is no log; None: it ends before that byte,
    because it was cut (logs/rotation.py): the rest stands in `rotated_log(file)` from there on."""
    try:
        # A pipe without a writer must not block its reader.
        with os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
            if os.fstat(stream.fileno()).st_size < offset:
                return None
            stream.seek(offset)
            return stream.read(limit)
    except OSError:
        return b""


def end_of(file: Path, limit: int) -> bytes:
    """Return the last bytes of a log, also where it was cut a moment ago; nothing where there is none."""
    data = _end_of_file(file, limit)
    return data if len(data) == limit else _end_of_file(rotated_log(file), limit - len(data)) + data


def _end_of_file(file: Path, limit: int) -> bytes:
    try:
        size = file.stat().st_size
    except OSError:
        return b""
    return read_from(file, max(0, size - limit), limit) or b""


def split(data: bytes) -> list[str]:
    """Return the lines of a piece of a log, each cut to LINE_CHARACTERS."""
    return [line[:_UNFINISHED_BYTES].decode(errors="replace")[:LINE_CHARACTERS] for line in data.splitlines()]


_DEAD = "EngineDeadError: "
_RECORD = re.compile(r"^\((?P<who>[Aa][Pp][Ii]Server[^)]*)\) ERROR \S+ \S+ \[[^\]]+\] ")
"""vLLM puts this before each line of a traceback, with the time of the first."""
_ANSWER = re.compile(r'^(?:\([^)]*\) )?INFO: .*" 50[03] ')
"""uvicorn's line of a request that the dead engine had."""
_SEARCHED_BYTES = 8 << 20
"""A request leaves 5 to 7 KiB: those of a thousand requests."""
_GROWTH = 8


def without_echoes(lines: Sequence[str]) -> list[str]:
    """Return the lines without these tracebacks and the answers after them. The first error of each API server
    stays."""
    if not _has_dead_engine(lines):
        return list(lines)
    echoes: set[int] = set()
    reported: set[str] = set()
    begun: dict[str, tuple[str, list[int]]] = {}
    for index, line in enumerate(lines):
        text = plain_line(line)
        record = _RECORD.match(text)
        if record is None:
            if reported and _ANSWER.match(text):
                echoes.add(index)
            continue
        # Lines of several servers stand among each other, and one place logs one traceback after the other.
        who = record["who"]
        before, indices = begun.get(who, ("", []))
        if before != record[0]:
            indices = []
            begun[who] = record[0], indices
        indices.append(index)
        if _DEAD in text:
            echoes.update(indices if who in reported else indices[:-1])
            reported.add(who)
            indices.clear()
    return [line for index, line in enumerate(lines) if index not in echoes]


def last_lines(end: Callable[[int], bytes], lines: int, limit: int) -> tuple[str, ...]:
    """Return the last lines of a log without these tracebacks, at most so many, and `limit` bytes. `end`: its last
    bytes, at most so many. What is read and searched has a limit too, however many requests there were."""
    size = limit
    while True:
        data = end(size)
        read = split(data)
        distinct = without_echoes(read)
        kept = _last(distinct, lines, limit)
        is_full = len(kept) == lines or len(kept) < len(distinct)
        is_all = len(data) < size or size >= _SEARCHED_BYTES
        if is_full or is_all or not _has_dead_engine(read):
            return tuple(kept)
        size = min(size * _GROWTH, _SEARCHED_BYTES)


def _has_dead_engine(lines: Sequence[str]) -> bool:
    return any(_DEAD in line for line in lines)


def _last(lines: Sequence[str], most: int, limit: int) -> list[str]:
    """Return the last lines, at most so many, and of so many bytes."""
    kept: list[str] = []
    for line in reversed(lines[-most:]):
        limit -= len(line.encode(errors="replace")) + 1
        if limit < 0:
            break
        kept.append(line)
    return kept[::-1]
