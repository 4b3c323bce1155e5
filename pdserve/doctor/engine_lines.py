"""The two lines in which an engine reports its figures every ten seconds, as vLLM 0.32 writes them.

    Engine 000: Avg prompt throughput: 0.8 tokens/s, ..., Running: 0 reqs, Waiting: 0 reqs, Preemptions: 2,
        GPU KV cache usage: 97.1%, Prefix cache hit rate: 0.0%, External prefix cache hit rate: 99.8%
    KV Transfer metrics: Num successful transfers=3, ..., Throughput (MB/s)=812.5, ..., Num failed transfers=0

An engine with several data-parallel ranks writes both lines for each of them, the second without its rank; with
--aggregate-engine-logging it writes one for all, which begins with `8 Engines Aggregated: `. Below a MultiConnector the
second has a dictionary for each child:

    KV Transfer metrics: MooncakeConnector={'Num successful transfers': 3, ...}
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

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
    """What an engine did in one interval."""

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
    """Of the transfers that succeeded."""


_Line = TypeVar("_Line", EngineLoad, Transfers)


def loads(lines: Iterable[str]) -> Iterator[EngineLoad]:
    """Of every such line."""
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


def transfers(lines: Iterable[str]) -> Iterator[Transfers]:
    """Of every such line."""
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


def of_a_rank(lines: Iterable[_Line]) -> list[_Line]:
    """Those of the rank that has the most: as many intervals have passed, however many ranks write a line in each."""
    ranks: dict[int | None, list[_Line]] = {}
    for line in lines:
        ranks.setdefault(line.rank, []).append(line)
    return max(ranks.values(), key=len, default=[])


def _rank(match: re.Match[str]) -> int | None:
    return None if match["rank"] is None else int(match["rank"])
