"""Reduce one log to what the rules ask of it: a log may have millions of lines, and there may be hundreds of logs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pdserve.doctor.records import EvidenceLine, ProcessLog
from pdserve.logs.causes import Hint, hint_of_match
from pdserve.logs.lines import without_echoes
from pdserve.logs.symptoms import SYMPTOMS, Symptom

_TIME = re.compile(
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?Z?"  # LMCache, the proxy
    r"|(?<= )\d\d-\d\d \d\d:\d\d:\d\d"  # vLLM: no year
    r"|(?<=^[IWEF])\d{4} \d\d:\d\d:\d\d(?:\.\d+)?"  # Mooncake (glog): month and day
)
_BEGINNING = 120
"""A time further on belongs to the message."""


def written_at(line: str) -> str:
    """Return the time that a line has; empty where it has none."""
    match = _TIME.search(line[:_BEGINNING])
    return match[0] if match else ""


_COUNT = r"\d{1,15}"
_NUMBER = r"\d{1,15}(?:\.\d{1,20})?"
"""What is longer is of a line that was changed, and no number that can be counted with."""
_LOAD = re.compile(
    rf"(?:Engine (?P<rank>{_COUNT})|\d+ Engines Aggregated): Avg prompt throughput: (?P<prompt>{_NUMBER}) tokens/s.*?"
    rf"Running: (?P<running>{_COUNT}) reqs, Waiting: (?P<waiting>{_COUNT}) reqs"
    rf"(?:, Deferred: (?P<deferred>{_COUNT}) reqs)?"
    rf"(?:, KV fetch: \d+ waiting to start, (?P<fetching>{_COUNT}) in progress)?"
    rf"(?:.*?Preemptions: (?P<preemptions>{_COUNT})\b)?"
    rf".*? KV cache usage: (?P<kv>{_NUMBER})%"
    rf"(?:.*?External prefix cache hit rate: (?P<external>{_NUMBER})%)?"
)
_TRANSFERS = "KV Transfer metrics: "
_FIGURE = re.compile(r"'?(?P<name>[A-Z][\w ]+(?: \([\w/]+\))?)'?[=:] ?(?P<value>" + _NUMBER + r")(?!\d)")


@dataclass(frozen=True)
class EngineLoad:
    """The load of an engine in one interval."""

    text: str
    rank: int | None
    """Data-parallel; None: the line is of all of them."""
    prompt_rate: float
    """Prompt tokens a second."""
    running: int
    waiting: int
    """For a place or for blocks, without those whose KV is on its way. vLLM counts as Deferred whoever was passed over
    once, until it runs: also who now waits for blocks. So where a line has the stages of fetches, those in progress are
    left out, else all that are Deferred."""
    preemptions: int
    """0 also in vllm 0.32: its log call sets the number to 0 before it looks at it (v1/metrics/loggers.py)."""
    kv_usage: float
    """0 to 1."""
    external_hits: float | None
    """0 to 1; None: it has no connector that looks KV up."""


@dataclass(frozen=True)
class Transfers:
    """The KV that an engine moved in one interval, its connectors summed."""

    text: str
    rank: int | None
    """That of the figures before it."""
    done: int
    failed: int
    expired: int
    megabytes_a_second: float | None
    """The megabytes a second of the transfers that succeeded."""


_Line = TypeVar("_Line", EngineLoad, Transfers)


def engine_loads(lines: Iterable[str]) -> Iterator[EngineLoad]:
    """Yield the load of every such line."""
    for line in lines:
        if " KV cache usage: " in line and (match := _LOAD.search(line)):
            external = match["external"]
            yield EngineLoad(
                text=line,
                rank=_rank(match),
                prompt_rate=float(match["prompt"]),
                running=int(match["running"]),
                waiting=int(match["waiting"]) - int(match["fetching"] or match["deferred"] or 0),
                preemptions=int(match["preemptions"] or 0),
                kv_usage=float(match["kv"]) / 100,
                external_hits=None if external is None else float(external) / 100,
            )


def engine_transfers(lines: Iterable[str]) -> Iterator[Transfers]:
    """Yield the transfers of every such line."""
    rank = None
    for line in lines:
        _, mark, figures = line.partition(_TRANSFERS)
        if not mark:
            if " KV cache usage: " in line and (match := _LOAD.search(line)):
                rank = _rank(match)
            continue
        values: dict[str, float] = {}
        rates = []
        for match in _FIGURE.finditer(figures):
            name, value = match["name"], float(match["value"])
            values[name] = values.get(name, 0.0) + value
            if name == "Throughput (MB/s)" and value:
                rates.append(value)
        yield Transfers(
            text=line,
            rank=rank,
            done=int(values.get("Num successful transfers", 0)),
            failed=int(values.get("Num failed transfers", 0) + values.get("Num failed recvs", 0)),
            expired=int(values.get("Num KV expired reqs", 0)),
            megabytes_a_second=min(rates, default=None),
        )


def busiest_rank(lines: Iterable[_Line]) -> list[_Line]:
    """Return the lines of the rank that has the most: as many intervals have passed, however many ranks write a line in
    each."""
    ranks: dict[int | None, list[_Line]] = {}
    for line in lines:
        ranks.setdefault(line.rank, []).append(line)
    return max(ranks.values(), key=len, default=[])


def _rank(match: re.Match[str]) -> int | None:
    return None if match["rank"] is None else int(match["rank"])


_REQUEST_LINE = re.compile(r"^\S+Z (?P<outcome>ok|error|cancelled|rejected) (?P<status>\d{3}) \S+ id=")
_FIELD = re.compile(r' (?P<name>prompt_tokens|queue_ms|error)=(?P<value>"(?:[^"\\]|\\.)*"|\S+)')


class _Fields(BaseModel):
    """The fields of a line in JSON. A number beyond these bounds is of a line that was changed."""

    model_config = ConfigDict(strict=True)

    status: Annotated[int, Field(ge=0, le=999)]
    error: str | None = ""
    prompt_tokens: Annotated[int, Field(ge=0, le=1 << 40)] | None = None
    queue_ms: Annotated[float, Field(ge=0, le=1e15)] | None = None


@dataclass(frozen=True)
class EndedRequest:
    """The end of a request. None: the line does not have it."""

    text: str
    status: int
    error: str = ""
    prompt_tokens: int | None = None
    queue_ms: float | None = None


def ended_requests(lines: Iterable[str]) -> Iterator[EndedRequest]:
    """Yield the request of every such line; what is none, or is torn, is left out."""
    for line in lines:
        if (request := _of_json(line) if line.startswith("{") else _of_text(line)) is not None:
            yield request


def _of_text(line: str) -> EndedRequest | None:
    if (match := _REQUEST_LINE.match(line)) is None:
        return None
    fields = {each["name"]: each["value"] for each in _FIELD.finditer(line)}
    tokens, queue, error = fields.get("prompt_tokens", ""), fields.get("queue_ms", ""), fields.get("error", "")
    return EndedRequest(
        line,
        int(match["status"]),
        error.strip('"'),
        int(tokens) if re.fullmatch(r"\d{1,12}", tokens) else None,
        float(queue) if re.fullmatch(r"\d{1,15}(?:\.\d{1,20})?", queue) else None,
    )


def _of_json(line: str) -> EndedRequest | None:
    try:
        fields = _Fields.model_validate_json(line)
    except ValidationError:
        return None
    return EndedRequest(line, fields.status, fields.error or "", fields.prompt_tokens, fields.queue_ms)


TAIL_LINES = 200
"""In which the cause of a death stands (logs/causes.py), not counting what each request repeats (logs/lines.py)."""
_SHOWN_CHARACTERS = 300
_QUOTED = re.compile(
    r"^(?:\([^)]*\) )?(?:INFO|DEBUG) [^\]]*\] "
    r"(?:Received request \S+: |Request \S+ (?:details|JSON body): |Generated response \S+)"
)
"""A line in which vLLM quotes a prompt or an answer (entrypoints/serve/utils/request_logger.py): any text."""
_EVICTION = re.compile(r"L1 memory usage [\d.]+ above watermark")


@dataclass(frozen=True)
class KnownLine:
    """A known line: how often it is in the log, and the first of them."""

    symptom: Symptom
    hint: Hint
    times: int
    first: EvidenceLine


@dataclass(frozen=True)
class LogFacts:
    """The facts of one process's log."""

    process: str
    role: str
    file: str
    tail: tuple[str, ...]
    seen: tuple[KnownLine, ...] = ()
    loads: tuple[EngineLoad, ...] = ()
    transfers: tuple[Transfers, ...] = ()
    requests: tuple[EndedRequest, ...] = ()
    evictions: tuple[str, ...] = ()
    """Lines in which LMCache made room in L1."""

    def evidence(self, line: str) -> EvidenceLine:
        return _evidence(self.file, line)


def reduce_log(log: ProcessLog) -> LogFacts:
    """Reduce a log to its facts. Whatever stands in the log, it is text."""
    is_proxy = log.role == "proxy"
    own = replace(log, lines=tuple(line for line in log.lines if not _QUOTED.match(line)))
    return LogFacts(
        process=log.process,
        role=log.role,
        file=log.file,
        tail=tuple(without_echoes(log.lines)[-TAIL_LINES:]),
        seen=tuple(_symptoms(own)),
        loads=tuple(engine_loads(own.lines)),
        transfers=tuple(engine_transfers(own.lines)),
        requests=tuple(ended_requests(log.lines)) if is_proxy else (),
        evictions=tuple(line for line in log.lines if _EVICTION.search(line)) if log.role == "lmcache" else (),
    )


def _symptoms(log: ProcessLog) -> Iterator[KnownLine]:
    for symptom in SYMPTOMS:
        if symptom.roles is None or log.role in symptom.roles:
            yield from _matches(symptom, log)


def _matches(symptom: Symptom, log: ProcessLog) -> Iterable[KnownLine]:
    """Return one entry for all lines of a symptom: lines that differ only in a request or an address have the same
    cause."""
    times, first = 0, None
    for line in log.lines:
        if (match := symptom.pattern.search(line)) is not None:
            times += 1
            first = first or (match, line)
    if first is None:
        return ()
    match, line = first
    return (KnownLine(symptom, hint_of_match(symptom, log.role, match), times, _evidence(log.file, line)),)


def _evidence(file: str, line: str) -> EvidenceLine:
    return EvidenceLine(file, written_at(line), line.strip()[:_SHOWN_CHARACTERS])
