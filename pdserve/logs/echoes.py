"""What an API server logs for each request that its dead engine had: the same for every one, after the cause."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from pdserve.logs.lines import plain, split

_DEAD = "EngineDeadError: "
_RECORD = re.compile(r"^\((?P<who>[Aa][Pp][Ii]Server[^)]*)\) ERROR \S+ \S+ \[[^\]]+\] ")
"""vLLM puts this before each line of a traceback, with the time of the first."""
_ANSWER = re.compile(r'^(?:\([^)]*\) )?INFO: .*" 50[03] ')
"""uvicorn's line of a request that the dead engine had."""
_SEARCHED_BYTES = 8 << 20
"""A request leaves 5 to 7 KiB: those of a thousand requests."""
_GROWTH = 8


def without_echoes(lines: Sequence[str]) -> list[str]:
    """The lines without these tracebacks and the answers after them. The first error of each API server stays."""
    if not _has_dead_engine(lines):
        return list(lines)
    echoes: set[int] = set()
    reported: set[str] = set()
    begun: dict[str, tuple[str, list[int]]] = {}
    for index, line in enumerate(lines):
        text = plain(line)
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
    """The last lines of a log without these tracebacks, at most so many, and `limit` bytes. `end`: its last bytes, at
    most so many. What is read and searched has a limit too, however many requests there were."""
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
    """The last ones, at most so many, and of so many bytes."""
    kept: list[str] = []
    for line in reversed(lines[-most:]):
        limit -= len(line.encode(errors="replace")) + 1
        if limit < 0:
            break
        kept.append(line)
    return kept[::-1]
