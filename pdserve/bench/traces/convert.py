"""From the lines of each format to sessions, with the lines that AIPerf is given. Pure.

Answers have the length that the trace asks for, else the usual one: with `ignore_eos` every request has a known length,
and the check of the answers' lengths holds for traces too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pdserve.bench.traces.line import TraceLine
from pdserve.bench.traces.rows import AgentRow, ConversationRow, LoggedMessage, MessagesRow, MooncakeRow, Spawn
from pdserve.bench.traces.trace import Piece, Session, Turn

BLOCKS = (512, 16, 64, 32, 128, 256, 1024)
"""Sizes of blocks that published traces have, Mooncake's first."""
_TEXT_BLOCK = 64
"""Characters that are compared as one: a difference counts from the block on that it is in."""
_CHARACTERS_A_TOKEN = 4.0
"""Of English text and usual vocabularies. It weighs texts against answers, whose tokens are known."""

Sessions = tuple[Session, ...]


def mooncake(lines: Sequence[TraceLine], output_tokens: int, block: int | None) -> tuple[Sessions, int | None]:
    """Lines of a session are its turns: each adds its prompt to the ones before and their answers."""
    rows = [(line, line.read(MooncakeRow)) for line in lines]
    fitted = _block(rows, block)
    grouped: dict[str, list[tuple[TraceLine, MooncakeRow]]] = {}
    for line, row in rows:
        grouped.setdefault(row.session_id or f"line-{line.number}", []).append((line, row))
    sessions = []
    for session, its_rows in grouped.items():
        turns, out = [], []
        for line, row in its_rows:
            length = row.output_length or output_tokens
            pieces = _text(row.text_input) if row.text_input else _blocks(line, row, fitted)
            turns.append(Turn(length, pieces, whole=False, input_tokens=row.input_length))
            kept = row.model_dump(exclude_none=True) | {"session_id": session, "output_length": length}
            out.append(kept)
        sessions.append(Session(session, tuple(turns), tuple(out)))
    return tuple(sessions), fitted


def conversations(lines: Sequence[TraceLine], output_tokens: int, _: int | None) -> tuple[Sessions, int | None]:
    """A leading system turn is no request: AIPerf sends it before the first one."""
    sessions = []
    for line in lines:
        row = line.read(ConversationRow)
        session = row.session_id or f"line-{line.number}"
        system = row.turns[0].role == "system" and len(row.turns) > 1
        said = row.turns[1:] if system else row.turns
        turns, out = [], []
        for index, turn in enumerate(said):
            before = row.turns[0].text if system and index == 0 else ""
            length = turn.output_length or output_tokens
            turns.append(Turn(length, _text(before + turn.text), whole=False))
            out.append(turn.model_dump(exclude_none=True) | {"output_length": length})
        if system:
            out.insert(0, {"role": "system", "text": row.turns[0].text})
        sessions.append(Session(session, tuple(turns), ({"session_id": session, "turns": out},)))
    _unique(lines, sessions)
    return tuple(sessions), None


def sub_agents(lines: Sequence[TraceLine], output_tokens: int, _: int | None) -> tuple[Sessions, int | None]:
    """A fork continues its parent's prompt and answer, a spawn begins anew."""
    rows = [(line, line.read(AgentRow)) for line in lines]
    parents: dict[str, tuple[str, int]] = {}
    started: dict[str, TraceLine] = {}
    for line, row in rows:
        started |= dict.fromkeys(row.pre_session_spawns, line)
        for index, turn in enumerate(row.turns):
            forks = [entry if isinstance(entry, str) else entry.child for entry in turn.forks]
            spawns = [
                child for entry in turn.spawns for child in (entry.children if isinstance(entry, Spawn) else [entry])
            ]
            parents |= dict.fromkeys(forks, (row.session_id, index))
            started |= dict.fromkeys([*forks, *spawns], line)
    known = {row.session_id for _, row in rows}
    for child, line in started.items():
        if child not in known:
            raise line.bad(f"it starts the session {child!r}, which the trace does not have")
    sessions = []
    for line, row in rows:
        whole = line.row.get("context_mode") == "message_array_with_responses"
        turns = tuple(
            Turn(turn.max_tokens or output_tokens, _messages(turn.messages), whole=whole) for turn in row.turns
        )
        out = dict(line.row) | {
            "turns": [
                {**raw, "max_tokens": turn.output_tokens} for raw, turn in zip(line.row["turns"], turns, strict=True)
            ]
        }
        place = parents.get(row.session_id)
        sessions.append(Session(row.session_id, turns, (out,), parent=place, root=row.session_id not in started))
    _unique(lines, sessions)
    if not any(session.root for session in sessions):
        raise lines[0].bad("no session begins by itself: each is started by another one")
    return tuple(sessions), None


def messages(lines: Sequence[TraceLine], output_tokens: int, _: int | None) -> tuple[Sessions, int | None]:
    """A line that ends with an answer is a whole conversation: a request for each answer in it. What the log has as
    the model's answers is sent as it is, so that every run has the same prompts."""
    grouped: dict[str, list[tuple[Turn, dict[str, Any]]]] = {}
    for line in lines:
        raw = openai_row(line.row)
        row = line.read(MessagesRow, raw)
        session = row.session_id or f"line-{line.number}"
        ends = [index for index, message in enumerate(row.messages) if message.role == "assistant"]
        whole_conversation = row.messages[-1].role == "assistant"
        for end in ends if whole_conversation else [len(row.messages)]:
            if end == 0:
                continue  # nothing was asked before it
            asked, length = row.messages[:end], row.output_length or output_tokens
            tools = [(f"tools:{row.tools}", 0.0)] if row.tools else []
            out = {"session_id": session, "messages": raw["messages"][:end], "output_length": length}
            out |= {"tools": row.tools} if row.tools else {}
            out |= {"delay": row.delay} if row.delay is not None else {}
            turn = Turn(length, [*tools, *_messages(asked)], whole=True)
            grouped.setdefault(session, []).append((turn, out))
    sessions = tuple(
        Session(session, tuple(turn for turn, _ in pairs), tuple(row for _, row in pairs))
        for session, pairs in grouped.items()
    )
    return sessions, None


def openai_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The request in a line of a log: the line itself, or its `body` (OpenAI's batch files) or `request`. Its answer's
    length is the one that was counted, else the one that was asked for."""
    inner = next((row[key] for key in ("body", "request") if isinstance(row.get(key), Mapping)), row)
    if "messages" not in inner:
        return {}
    answer = row.get("response")
    usage = (answer if isinstance(answer, Mapping) else row).get("usage")
    lengths = [
        row.get("output_length"),
        usage.get("completion_tokens") if isinstance(usage, Mapping) else None,
        inner.get("max_completion_tokens"),
        inner.get("max_tokens"),
    ]
    found = {
        "messages": inner["messages"],
        "tools": inner.get("tools") or None,
        "session_id": row.get("session_id", inner.get("session_id")),
        "output_length": next((length for length in lengths if length is not None), None),
        "delay": row.get("delay"),
    }
    return {name: value for name, value in found.items() if value is not None}


def _block(rows: Iterable[tuple[TraceLine, MooncakeRow]], chosen: int | None) -> int | None:
    """The one size of block by which every line has as many hash ids as it has blocks. Raises RecipeError."""
    hashed = [(line, row.input_length, len(row.hash_ids)) for line, row in rows if row.input_length and row.hash_ids]
    if not hashed:
        return None

    def misfit(size: int) -> tuple[TraceLine, int, int] | None:
        return next((each for each in hashed if each[2] != -(-each[1] // size)), None)

    for size in (chosen,) if chosen is not None else BLOCKS:
        if misfit(size) is None:
            return size
    line, length, ids = misfit(chosen or BLOCKS[0]) or hashed[0]
    tried = f"blocks of {chosen}" if chosen is not None else f"blocks of {', '.join(map(str, BLOCKS))}"
    raise line.bad(
        f"{ids} hash ids are not the blocks of {length} tokens, and {tried} tokens do not fit every line",
        "one size of block has to fit all lines: give it (--trace-block), or correct the trace",
    )


def _blocks(line: TraceLine, row: MooncakeRow, block: int | None) -> list[Piece]:
    length = row.input_length or 0
    if not row.hash_ids or block is None:
        return [(("line", line.number), float(length))]
    full = len(row.hash_ids) - 1
    tokens = [float(block)] * full + [float(length - full * block)]
    return [((number, size), size) for number, size in zip(row.hash_ids, tokens, strict=True)]


def _messages(some: Sequence[LoggedMessage]) -> list[Piece]:
    return _text("".join(message.text for message in some))


def _text(text: str) -> list[Piece]:
    parts = [text[start : start + _TEXT_BLOCK] for start in range(0, len(text), _TEXT_BLOCK)]
    return [(part, len(part) / _CHARACTERS_A_TOKEN) for part in parts]


def _unique(lines: Sequence[TraceLine], sessions: Sequence[Session]) -> None:
    seen: set[str] = set()
    for line, session in zip(lines, sessions, strict=True):
        if session.id in seen:
            raise line.bad(f"the session {session.id!r} is there twice")
        seen.add(session.id)
