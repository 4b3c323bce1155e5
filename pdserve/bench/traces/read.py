"""Reads a trace file, line by line, with the line in every error.

The format is known by the keys of the first line:

    turns with messages                 sub-agents      AIPerf's dag_jsonl: sessions that fork and spawn others
    turns                               conversations   AIPerf's multi_turn
    messages, or a body that has them   messages        log of OpenAI requests, or whole conversations
    input_length or text_input          mooncake        Mooncake's trace, with session_id and delay as AIPerf reads it

Recorded timestamps are not replayed: a load says how requests are sent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pdserve.bench.traces import agentic
from pdserve.bench.traces.convert import conversations, messages, mooncake, openai_row, sub_agents
from pdserve.bench.traces.line import FORMATS, TraceLine
from pdserve.bench.traces.trace import RequestTrace, Session, TraceFormat
from pdserve.errors import RecipeError

_CURRENT = Path()

Reader = Callable[[list[TraceLine], int, int | None], tuple[tuple[Session, ...], int | None]]


def read_trace(
    name: str,
    *,
    output_tokens: int,
    block: int | None = None,
    sessions: int | None = None,
    folder: Path = _CURRENT,
) -> RequestTrace:
    """The file, or the trace that pdserve has under this name. `output_tokens`: of answers whose length it does not
    have. `sessions`: only the first so many. `folder`: the name is relative to it. Raises RecipeError."""
    path = folder / name
    if name == agentic.NAME and not path.exists():
        data, where = agentic.text().encode(), name
    else:
        where = str(path)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise RecipeError(
                "this trace cannot be read",
                where=where,
                cause=error.strerror or str(error),
                todo=f"give a file, or {agentic.NAME}, which pdserve has; {FORMATS}",
            ) from error
    lines = list(_lines(data, where))
    if not lines:
        raise RecipeError("this trace is empty", where=where, todo=FORMATS)
    form = _format_of(lines[0])
    read, fitted = _READERS[form](lines, output_tokens, block)
    if not read:
        raise RecipeError("this trace has no request", where=where, cause="no line asks for an answer", todo=FORMATS)
    return RequestTrace(path.name, hashlib.sha256(data).hexdigest(), form, first_sessions(read, sessions), fitted)


def _lines(data: bytes, where: str) -> Iterator[TraceLine]:
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        place = f"{where}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise RecipeError(
                "this line of the trace is no JSON",
                where=place,
                cause=str(error),
                todo=f"a trace has one JSON object a line; {FORMATS}",
            ) from None
        if not isinstance(row, dict):
            raise TraceLine(place, number, {}).bad(f"it is a {type(row).__name__}, not an object")
        yield TraceLine(place, number, row)


def _format_of(line: TraceLine) -> TraceFormat:
    row = line.row
    if isinstance(turns := row.get("turns"), list) or row.get("orchestrator"):
        first = turns[0] if turns else {}
        agents = isinstance(first, dict) and "messages" in first
        return "sub-agents" if agents or row.get("orchestrator") else "conversations"
    if "messages" in openai_row(row):
        return "messages"
    if "input_length" in row or "text_input" in row:
        return "mooncake"
    keys = ", ".join(list(row)[:8]) or "none"
    raise line.bad(f"its keys ({keys}) are of no format that can be replayed")


def first_sessions(sessions: tuple[Session, ...], some: int | None) -> tuple[Session, ...]:
    """The first that begin by themselves, and all that they start."""
    if some is None:
        return sessions
    roots = [session.id for session in sessions if session.root][:some]
    children: dict[str, list[str]] = {}
    for session in sessions:
        for row in session.rows:
            children.setdefault(session.id, []).extend(_started(row))
    kept: set[str] = set()
    while roots:
        one = roots.pop()
        if one not in kept:
            kept.add(one)
            roots += children.get(one, [])
    return tuple(session for session in sessions if session.id in kept)


def _started(row: Mapping[str, Any]) -> Iterator[str]:
    yield from row.get("pre_session_spawns", ())
    for turn in row.get("turns", ()):
        for entry in (*turn.get("forks", ()), *turn.get("spawns", ())):
            if isinstance(entry, str):
                yield entry
            else:
                yield from entry.get("children") or [entry["child"]]


_READERS: Mapping[TraceFormat, Reader] = {
    "mooncake": mooncake,
    "conversations": conversations,
    "sub-agents": sub_agents,
    "messages": messages,
}
