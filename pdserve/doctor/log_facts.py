"""One log, reduced to what the rules ask of it: a log may have millions of lines, and there may be hundreds of logs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from pdserve.doctor.diagnosis import EvidenceLine
from pdserve.doctor.engine_lines import EngineLoad, Transfers, loads, transfers
from pdserve.doctor.log_times import written_at
from pdserve.doctor.records import ProcessLog
from pdserve.doctor.request_lines import EndedRequest, requests
from pdserve.logs.causes import Hint, of_match
from pdserve.logs.echoes import without_echoes
from pdserve.logs.symptoms import SYMPTOMS, Symptom

TAIL_LINES = 200
"""In which the cause of a death stands (logs/causes.py), not counting what each request repeats (logs/echoes.py)."""
_SHOWN_CHARACTERS = 300
_QUOTED = re.compile(
    r"^(?:\([^)]*\) )?(?:INFO|DEBUG) [^\]]*\] "
    r"(?:Received request \S+: |Request \S+ (?:details|JSON body): |Generated response \S+)"
)
"""A line in which vLLM quotes a prompt or an answer (entrypoints/serve/utils/request_logger.py): any text."""
_EVICTION = re.compile(r"L1 memory usage [\d.]+ above watermark")


@dataclass(frozen=True)
class Seen:
    """A known line: how often it is in the log, and the first of them."""

    symptom: Symptom
    hint: Hint
    times: int
    first: EvidenceLine


@dataclass(frozen=True)
class LogFacts:
    """Of one process."""

    process: str
    role: str
    file: str
    tail: tuple[str, ...]
    seen: tuple[Seen, ...] = ()
    loads: tuple[EngineLoad, ...] = ()
    transfers: tuple[Transfers, ...] = ()
    requests: tuple[EndedRequest, ...] = ()
    evictions: tuple[str, ...] = ()
    """Lines in which LMCache made room in L1."""

    def evidence(self, line: str) -> EvidenceLine:
        return _evidence(self.file, line)


def reduced(log: ProcessLog) -> LogFacts:
    """Pure: whatever stands in the log, it is text."""
    is_proxy = log.role == "proxy"
    own = replace(log, lines=tuple(line for line in log.lines if not _QUOTED.match(line)))
    return LogFacts(
        process=log.process,
        role=log.role,
        file=log.file,
        tail=tuple(without_echoes(log.lines)[-TAIL_LINES:]),
        seen=tuple(_symptoms(own)),
        loads=tuple(loads(own.lines)),
        transfers=tuple(transfers(own.lines)),
        requests=tuple(requests(log.lines)) if is_proxy else (),
        evictions=tuple(line for line in log.lines if _EVICTION.search(line)) if log.role == "lmcache" else (),
    )


def _symptoms(log: ProcessLog) -> Iterator[Seen]:
    for symptom in SYMPTOMS:
        if symptom.roles is None or log.role in symptom.roles:
            yield from _matches(symptom, log)


def _matches(symptom: Symptom, log: ProcessLog) -> Iterable[Seen]:
    """One entry: lines that differ only in a request or an address have the same cause."""
    times, first = 0, None
    for line in log.lines:
        if (match := symptom.pattern.search(line)) is not None:
            times += 1
            first = first or (match, line)
    if first is None:
        return ()
    match, line = first
    return (Seen(symptom, of_match(symptom, log.role, match), times, _evidence(log.file, line)),)


def _evidence(file: str, line: str) -> EvidenceLine:
    return EvidenceLine(file, written_at(line), line.strip()[:_SHOWN_CHARACTERS])
