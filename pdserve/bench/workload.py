"""A workload is what a client is asked to send: prompts and answers of a fixed length, or a trace, under a list of
loads.

The format of a trace is known by the keys of the first line:

    messages, or a body that has them   messages        log of OpenAI requests, or whole conversations
    input_length                        mooncake        Mooncake's trace, with session_id and delay as AIPerf reads it

Recorded timestamps are not replayed: a load says how requests are sent. Answers have the length that the trace asks
for, else the usual one: with `ignore_eos` every request has a known length, and the check of the answers' lengths holds
for traces too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pdserve.errors import RecipeError
from pdserve.plan.frozen import Frozen

SloMetric = Literal["ttft", "tpot", "itl", "e2e"]
SLO_MEANING: Mapping[SloMetric, str] = {
    "ttft": "time to first token",
    "tpot": "mean time of a token after the first",
    "itl": "99th percentile of the request's own gaps between chunks",
    "e2e": "time of the whole request",
}
ClientKind = Literal["vllm", "aiperf"]
USUAL_OUTPUT = 128
"""Tokens of an answer whose length a trace does not have."""
USUAL_GRACE = 30.0
"""Seconds that open requests have after those of a load, where it does not state them."""
SESSION_HEADER = "X-Session-ID"
"""The field's name of the header by which a proxy keeps a session on its workers."""


class Workload(Frozen):
    """Holds what is the same for every load of a benchmark."""

    input_tokens: int | None = Field(default=None, ge=1)
    """The input tokens of each prompt; None: the trace has its prompts."""
    output_tokens: int | None = Field(default=None, ge=1)
    """The output tokens of each answer; of a trace, of the answers whose length it does not have."""
    trace: str | None = Field(default=None, min_length=1)
    """A file, or the name of a trace that pdserve makes."""
    trace_digest: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """SHA-256 of the trace: another one under the same name is other work."""
    trace_block: int | None = Field(default=None, ge=1)
    """Tokens of a block with a hash id; None: the size that fits all lines."""
    sessions: int | None = Field(default=None, ge=1)
    """The number of the trace's first sessions that are played; None: all."""
    client: ClientKind | None = None
    """None: AIPerf where it is needed."""
    session_header: str | None = Field(default=None, pattern=r"^[A-Za-z0-9-]+$")
    """In which the client names the session; None: X-Session-ID."""
    seed: int = 0
    warmup: int = Field(default=8, ge=0)
    """Requests before each measurement, of a cache salt of their own; without a trace, of prompts of their own too."""
    repeats: int = Field(default=3, ge=1)
    max_failed: float = Field(default=0.0, ge=0, lt=1)
    """Share of requests that may fail."""
    slo: Mapping[SloMetric, float] = {}
    """Milliseconds that a good request takes at most."""

    @model_validator(mode="after")
    def _whole(self) -> Workload:
        if self.trace is not None:
            if self.input_tokens is not None:
                raise ValueError("a trace has its own prompts: leave input_tokens out")
            if self.client == "vllm":
                raise ValueError("vllm bench serve replays no trace: client aiperf does")
            return self
        if self.input_tokens is None or self.output_tokens is None:
            raise ValueError("give input_tokens and output_tokens, or a trace")
        alone = ("trace_digest", "trace_block", "sessions", "session_header")
        if lost := [name for name in alone if getattr(self, name) is not None]:
            raise ValueError(f"{', '.join(lost)}: only for a trace")
        return self

    @property
    def title(self) -> str:
        """Return `1024 in, 128 out`, or the name of the trace."""
        if self.trace is None:
            return f"{self.input_tokens} in, {self.output_tokens} out"
        some = "" if self.sessions is None else f", {self.sessions} sessions"
        return f"trace {Path(self.trace).name}{some}"

    def client_for(self, load: Load) -> ClientKind:
        """Return the client that is chosen, or the one that is needed."""
        return self.client or ("aiperf" if self.trace is not None or load.seconds is not None else "vllm")


class Load(Frozen):
    """Says how many requests there are and how they are sent: at most so many at a time, or so many a second."""

    requests: int = Field(ge=1)
    concurrency: int | None = Field(default=None, ge=1)
    rate: float | None = Field(default=None, gt=0)
    seconds: float | None = Field(default=None, gt=0)
    """After which nothing is sent any more, even if fewer requests were."""
    grace_seconds: float | None = Field(default=None, ge=0)
    """Time that open requests then have; what is open after that is cut. None: the usual ones."""

    @property
    def grace(self) -> float:
        """Return the grace time in seconds; 0 where the time is not limited."""
        if self.seconds is None:
            return 0.0
        return USUAL_GRACE if self.grace_seconds is None else self.grace_seconds

    @model_validator(mode="after")
    def _possible(self) -> Load:
        if (self.concurrency is None) == (self.rate is None):
            raise ValueError("a load has a concurrency or a rate")
        if self.concurrency is not None and self.requests < self.concurrency:
            raise ValueError(f"{self.requests} requests are never {self.concurrency} at a time")
        if self.grace_seconds is not None and self.seconds is None:
            raise ValueError("grace_seconds is the time after seconds: give both")
        return self

    @property
    def title(self) -> str:
        return f"concurrency {self.concurrency}" if self.rate is None else f"{self.rate:g} requests/s"


_REQUESTS_AT_LEAST, _REQUESTS_EACH = 32, 10


def usual_requests(load: float) -> int:
    """Return how many requests a load has: ten for each that may be open, or ten seconds of a rate; 32 at least:
    percentiles of fewer mean little."""
    return max(_REQUESTS_AT_LEAST, round(_REQUESTS_EACH * load))


TraceFormat = Literal["mooncake", "messages"]
Piece = tuple[Hashable, float]
"""Some text of a prompt, and its tokens: the same text is the same piece."""


@dataclass(frozen=True)
class Turn:
    """Describes a request of a session."""

    output_tokens: int
    pieces: Sequence[Piece]
    """What is new in its prompt, or all of it."""
    whole: bool
    """All of it: neither former turns nor answers come before it."""
    input_tokens: int | None = None
    """The input tokens of its pieces, where the trace has lengths."""


@dataclass(frozen=True)
class Session:
    """Turns that follow each other, each after the answer to the one before."""

    id: str
    turns: tuple[Turn, ...]
    rows: tuple[Mapping[str, Any], ...]
    """For AIPerf: lines of its own format."""


@dataclass(frozen=True)
class RequestTrace:
    """Holds the sessions of a trace, in the order of its file."""

    name: str
    digest: str
    """SHA-256 of the file."""
    format: TraceFormat
    sessions: tuple[Session, ...]
    block: int | None = None
    """Tokens of a block with a hash id; None: it has none."""

    @property
    def requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)

    def asked_output(self) -> Mapping[tuple[str, int], int]:
        """Return the length asked for of each answer, by session and turn."""
        return {
            (session.id, index): turn.output_tokens
            for session in self.sessions
            for index, turn in enumerate(session.turns)
        }


class TraceFacts(Frozen):
    """Describes a trace that was replayed, for the result."""

    name: str
    digest: str
    format: TraceFormat
    sessions: int
    requests: int
    block: int | None = None
    prefix_hit: float
    """In theory: the share of prompt tokens that stand at the beginning of an earlier prompt too, with a cache of any
    size, one request at a time in the order of the file."""
    estimated: bool
    """The lengths of its texts are known in characters only."""


FORMATS = "docs/guides/bench.md has the formats"
_AnyRow = TypeVar("_AnyRow", bound=BaseModel)


@dataclass(frozen=True)
class TraceLine:
    """Holds a line, read as JSON."""

    place: str
    """`trace.jsonl:7`."""
    number: int
    row: Mapping[str, Any]

    def read(self, kind: type[_AnyRow], row: Mapping[str, Any] | None = None) -> _AnyRow:
        """Return the line, or this part of it, in the form of `kind`. Raises RecipeError."""
        try:
            return kind.model_validate(self.row if row is None else row)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            key = ".".join(map(str, first["loc"]))
            raise self.bad(": ".join(filter(None, (key, first["msg"].removeprefix("Value error, "))))) from None

    def bad(self, cause: str, todo: str = FORMATS) -> RecipeError:
        """Return the error for what is wrong with the line."""
        return RecipeError("this line is no request of a trace", where=self.place, cause=cause, todo=todo)


_Tokens = Annotated[int, Field(gt=0, strict=True)]
_Milliseconds = Annotated[float, Field(ge=0)]
_Id = Annotated[str, Field(min_length=1)]


class _Row(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class LoggedMessage(_Row):
    """Has the OpenAI form, and is passed on as it is."""

    model_config = ConfigDict(extra="allow", frozen=True)

    role: str

    @property
    def text(self) -> str:
        """Return all of the message that a chat template may show."""
        shown = {name: value for name, value in (self.__pydantic_extra__ or {}).items() if value}
        content = shown.pop("content", "")
        return f"{self.role}:{content}{shown or ''}\n"


class MooncakeRow(_Row):
    """A request of the Mooncake trace: lengths and ids of blocks. AIPerf adds sessions and delays."""

    session_id: _Id | None = None
    input_length: _Tokens
    output_length: _Tokens | None = None
    hash_ids: list[int] | None = None
    delay: _Milliseconds | None = None


class MessagesRow(_Row):
    """A request of the OpenAI API, or a whole conversation with the answers in it."""

    messages: Annotated[list[LoggedMessage], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    session_id: _Id | None = None
    output_length: _Tokens | None = None
    delay: _Milliseconds | None = None


BLOCKS = (512, 16, 64, 32, 128, 256, 1024)
"""Sizes of blocks that published traces have, Mooncake's first."""
_TEXT_BLOCK = 64
"""Characters that are compared as one: a difference counts from the block on that it is in."""
_CHARACTERS_A_TOKEN = 4.0
"""The ratio of English text and usual vocabularies. It weighs texts against answers, whose tokens are known."""

Sessions = tuple[Session, ...]


def mooncake(lines: Sequence[TraceLine], output_tokens: int, block: int | None) -> tuple[Sessions, int | None]:
    """Read Mooncake's trace: lines of a session are its turns: each adds its prompt to the ones before and their
    answers."""
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
            turns.append(Turn(length, _blocks(line, row, fitted), whole=False, input_tokens=row.input_length))
            kept = row.model_dump(exclude_none=True) | {"session_id": session, "output_length": length}
            out.append(kept)
        sessions.append(Session(session, tuple(turns), tuple(out)))
    return tuple(sessions), fitted


def messages(lines: Sequence[TraceLine], output_tokens: int, _: int | None) -> tuple[Sessions, int | None]:
    """Read a log of OpenAI requests. A line that ends with an answer is a whole conversation: a request for each answer
    in it. What the log has as the model's answers is sent as it is, so that every run has the same prompts."""
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
    """Return the request in a line of a log: the line itself, or its `body` (OpenAI's batch files) or `request`. Its
    answer's length is the one that was counted, else the one that was asked for."""
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
    """Return the size of a block by which every line has one hash id for each of its blocks. Raises RecipeError."""
    hashed = [(line, row.input_length, len(row.hash_ids)) for line, row in rows if row.hash_ids]
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
    length = row.input_length
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


AGENTIC = "agentic-tiny"
"""A trace that pdserve has: sessions as coding agents have them, small enough for a context of 4096 tokens.

AIPerf's generator made its lines, which are kept so that they are the same everywhere and read without AIPerf:

    aiperf synthesize agentic-code --config agentic-tiny.json --num-sessions 8 --seed 20261

The generator's own sizes are those of large contexts (32,000 tokens before the first turn); agentic-tiny.json has
smaller ones. Every session begins with 640 tokens that all share (tools, system prompt) and 256 of one of two projects.
"""


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
    """Read a trace: the file, or the one that pdserve has under this name. `output_tokens`: of answers whose length it
    does not have. `sessions`: only the first so many. `folder`: the name is relative to it. Raises RecipeError."""
    path = folder / name
    if name == AGENTIC and not path.exists():
        data, where = files("pdserve.bench").joinpath(f"{AGENTIC}.jsonl").read_bytes(), name
    else:
        where = str(path)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise RecipeError(
                "this trace cannot be read",
                where=where,
                cause=error.strerror or str(error),
                todo=f"give a file, or {AGENTIC}, which pdserve has; {FORMATS}",
            ) from error
    lines = list(_lines(data, where))
    if not lines:
        raise RecipeError("this trace is empty", where=where, todo=FORMATS)
    form = _format_of(lines[0])
    read, fitted = _READERS[form](lines, output_tokens, block)
    if not read:
        raise RecipeError("this trace has no request", where=where, cause="no line asks for an answer", todo=FORMATS)
    return RequestTrace(path.name, hashlib.sha256(data).hexdigest(), form, read[:sessions], fitted)


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
    if "messages" in openai_row(row):
        return "messages"
    if "input_length" in row:
        return "mooncake"
    keys = ", ".join(list(row)[:8]) or "none"
    raise line.bad(f"its keys ({keys}) are of no format that can be replayed")


_READERS: Mapping[TraceFormat, Reader] = {
    "mooncake": mooncake,
    "messages": messages,
}


def facts(trace: RequestTrace) -> TraceFacts:
    """Return what the result has of a trace."""
    return TraceFacts(
        name=trace.name,
        digest=trace.digest,
        format=trace.format,
        sessions=len(trace.sessions),
        requests=trace.requests,
        block=trace.block,
        prefix_hit=prefix_hit(trace),
        estimated=asked_input(trace) is None,
    )


def prefix_hit(trace: RequestTrace, *, answers: bool = False) -> float:
    """Return the share of the tokens of all prompts that a cache has in theory, 0 to 1. `answers`: where a cache has
    the KV of answers too, as that of decode, or of an engine that does both."""
    seen: set[int] = set()
    asked = hits = 0.0
    for prompt, answer in _requests(trace.sessions):
        chain = 0
        for key, tokens in prompt:
            chain = hash((chain, key))
            asked += tokens
            hits += tokens if chain in seen else 0.0
            seen.add(chain)
        if answers:
            seen.add(hash((chain, answer[0])))
    return hits / asked if asked else 0.0


def asked_input(trace: RequestTrace) -> int | None:
    """Return the tokens of all prompts together, as a client sends them; None: the trace does not have lengths."""
    if any(turn.input_tokens is None for session in trace.sessions for turn in session.turns):
        return None
    return round(sum(tokens for prompt, _ in _requests(trace.sessions) for _, tokens in prompt))


def _requests(sessions: Sequence[Session]) -> list[tuple[list[Piece], Piece]]:
    """Return the prompt and the answer of each request, in order."""
    requests: list[tuple[list[Piece], Piece]] = []
    for session in sessions:
        history: list[Piece] = []
        for index, turn in enumerate(session.turns):
            prompt = list(turn.pieces) if turn.whole else [*history, *turn.pieces]
            answer: Piece = (("answer", session.id, index), float(turn.output_tokens))
            requests.append((prompt, answer))
            history = [*prompt, answer]
    return requests


def with_trace(workload: Workload, folder: Path = _CURRENT) -> tuple[Workload, RequestTrace]:
    """Read the trace that a workload names, relative to `folder`; the workload returned has its digest. Raises
    RecipeError when it cannot be read."""
    if workload.trace is None:
        raise ValueError("the workload has no trace")
    trace = read_trace(
        workload.trace,
        output_tokens=workload.output_tokens or USUAL_OUTPUT,
        block=workload.trace_block,
        sessions=workload.sessions,
        folder=folder,
    )
    return workload.model_copy(update={"trace_digest": trace.digest}), trace
