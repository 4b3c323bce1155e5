"""A cache that never hits, and which of the reasons for it this run shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from pdserve.doctor.diagnosis import Diagnosis, EvidenceLine
from pdserve.doctor.engine_lines import of_a_rank
from pdserve.doctor.log_facts import LogFacts
from pdserve.doctor.records import RunRecords
from pdserve.doctor.settings import filled, value_at

_INTERVALS = 6
"""Of ten seconds, in all of which prompts were computed and nothing was loaded."""
_TOKENS = 20_000
"""Looked up without a hit: fewer may be prompts that come for the first time."""
_INTERVAL_SECONDS = 10
"""vLLM's, between two lines with figures."""


@dataclass(frozen=True)
class _Reason:
    cause: str
    todo: str
    evidence: tuple[EvidenceLine, ...]
    setting: str = ""


def cache_never_hits(records: RunRecords, logs: Sequence[LogFacts]) -> Iterator[Diagnosis]:
    """An engine with LMCache that has computed prompts for a minute and loaded nothing."""
    evidence = {log.process: lines for log in logs if (lines := _silent_cache(records, log))}
    for name, engine in records.live.engines.items():
        if name in _cached(records) and (engine.external_queries or 0) >= _TOKENS and engine.external_hits == 0:
            line = f"external_prefix_cache_queries {engine.external_queries}, external_prefix_cache_hits 0"
            evidence.setdefault(name, (EvidenceLine(f"/metrics of {name}", "", line),))
    if not evidence:
        return
    reason = _reason(records, logs)
    yield Diagnosis(
        "cache-never-hits",
        tuple(evidence),
        f"LMCache has returned no KV to it: {reason.cause}",
        reason.todo,
        (*(lines[0] for lines in list(evidence.values())[:1]), *reason.evidence),
        setting=reason.setting,
    )


def kv_not_moved(records: RunRecords, logs: Sequence[LogFacts]) -> Iterator[Diagnosis]:
    """A decode that computes its prompts itself: answers are right, and disaggregation does nothing."""
    for log in logs:
        loads = [load for load in log.loads if load.prompt_rate > 0 and load.external_hits is not None]
        long = len(of_a_rank(loads)) >= _INTERVALS
        if log.role == "decode" and long and not any(load.external_hits for load in loads):
            yield Diagnosis(
                "kv-not-moved",
                (log.process,),
                "decode received no KV from prefill: it computes every prompt itself",
                "send requests to the proxy only, and let pdserve verify prove the transfer",
                tuple(log.evidence(load.text) for load in loads[:2]),
            )


def _cached(records: RunRecords) -> set[str]:
    """Engines that attach to LMCache and load from it."""
    processes = records.plan.processes if records.plan is not None else ()
    return {process.name for process in processes if process.lmcache is not None and process.role != "decode"}


def _silent_cache(records: RunRecords, log: LogFacts) -> tuple[EvidenceLine, ...]:
    loads = [load for load in log.loads if load.prompt_rate > 0 and load.external_hits is not None]
    if log.process not in _cached(records) or any(load.external_hits for load in loads):
        return ()
    if len(of_a_rank(loads)) < _INTERVALS:
        return ()
    if sum(load.prompt_rate for load in loads) * _INTERVAL_SECONDS < _TOKENS:
        return ()
    return tuple(log.evidence(load.text) for load in loads)


def _reason(records: RunRecords, logs: Sequence[LogFacts]) -> _Reason:
    """The first of the known reasons that this run shows."""
    for look in (_short_prompts, _evictions, _salts):
        if (reason := look(records, logs)) is not None:
            return reason
    return _Reason(
        "nothing in the run shows why; prompts that do not repeat have no hits either",
        "let pdserve verify prove a reload: if it does, the cache works, and the prompts differ within their first "
        "chunk (a date or an id at the beginning of a system prompt is enough)",
        (),
    )


def _short_prompts(records: RunRecords, logs: Sequence[LogFacts]) -> _Reason | None:
    """Only whole chunks are kept: most prompts have none."""
    chunk = records.plan.chunk_size if records.plan is not None else None
    with_tokens = [(log, request) for log in logs for request in log.requests if request.prompt_tokens is not None]
    if chunk is None or not with_tokens:
        return None
    typical = median(request.prompt_tokens or 0 for _, request in with_tokens)
    if typical >= chunk:
        return None
    log, request = with_tokens[0]
    keys = ("prefill.args.block-size", "engine.args.block-size")
    block = next((size for key in keys if (size := value_at(records.recipe, key)) is not None), None)
    fits = isinstance(block, int) and 0 < block <= typical
    return _Reason(
        f"half of the prompts have {typical:.0f} tokens or fewer, and LMCache keeps whole chunks of {chunk} only",
        "use smaller chunks (a multiple of the engine's block size), or longer common beginnings of prompts",
        (log.evidence(request.text),),
        f"lmcache.chunk_size={block}" if fits else "",
    )


def _evictions(records: RunRecords, logs: Sequence[LogFacts]) -> _Reason | None:
    """L1 is emptied before a prompt comes again."""
    lines = [log.evidence(line) for log in logs for line in log.evictions]
    figures = [
        EvidenceLine(f"/metrics of {name}", "", f"{cache.evicted_chunks} chunks evicted from L1")
        for name, cache in records.live.caches.items()
        if cache.evicted_chunks
    ]
    if not lines and not figures:
        return None
    return _Reason(
        "its L1 is too small: chunks are evicted before their prompt comes again",
        "give it more memory, if the host has it, or a second level (lmcache.l2)",
        tuple((*lines, *figures)[:2]),
        filled("lmcache.l1_size_gb*2", records),
    )


def _salts(records: RunRecords, _: Sequence[LogFacts]) -> _Reason | None:
    """A salt of its own for each request keeps all caches apart."""
    for name, cache in records.live.caches.items():
        if cache.salts is not None and cache.salts > 2 and not cache.hit_tokens:
            return _Reason(
                f"its chunks are stored under {cache.salts} different cache_salt values, and none of them came twice",
                "let clients send one cache_salt for each tenant, not for each request",
                (EvidenceLine(f"/metrics of {name}", "", f"lmcache_mp_l1_write_chunks_total of {cache.salts} salts"),),
            )
    return None
