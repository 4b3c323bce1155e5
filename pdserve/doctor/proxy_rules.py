"""What the proxy's lines and figures show: refusals, errors, waiting, workers that get nothing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

from pdserve.doctor.diagnosis import Diagnosis, EvidenceLine
from pdserve.doctor.log_facts import LogFacts
from pdserve.doctor.records import RunRecords
from pdserve.doctor.settings import filled

_BUSY = re.compile(r"The (?P<pool>\w+) pool is busy")
_LONG_WAIT_MS = 1000.0
_SOME = 10
"""Requests from which a median means something."""
_BUSY_SHARE = 0.9
"""Of a CPU: an event loop that uses so much has no room for another request."""
_WANTED_SHARE = 0.8
"""Of the time, in which it ran or waited for a CPU."""


def busy_pools(records: RunRecords, logs: Sequence[LogFacts]) -> Iterator[Diagnosis]:
    """Requests that were refused because a pool was full."""
    for log in logs:
        refused: dict[str, list[EvidenceLine]] = {}
        for request in log.requests:
            if request.status == 429 and (match := _BUSY.search(request.error)) is not None:
                refused.setdefault(match["pool"], []).append(log.evidence(request.text))
        for pool, lines in refused.items():
            yield _busy(records, log.process, pool, len(lines), tuple(lines))
    proxy = records.live.proxy
    if proxy is not None and not any(log.requests for log in logs):
        for pool, count in proxy.rejected.items():
            if count:
                line = EvidenceLine("/metrics of proxy", "", f"admission_rejections of the {pool} pool: {count}")
                yield _busy(records, "proxy", pool, count, (line,))


def _busy(records: RunRecords, process: str, pool: str, count: int, evidence: tuple[EvidenceLine, ...]) -> Diagnosis:
    more = filled(f"{pool}.instances+1", records)
    return Diagnosis(
        "pool-busy",
        (process,),
        f"the {pool} pool was full, and {count} requests were refused with 429",
        f"add instances of {pool}; or raise proxy.admission.{pool}.max_requests if its engines have room "
        "(kv-memory-full and preemptions show that they have none)",
        evidence,
        setting=more,
        times=count,
    )


def failed_requests(_: RunRecords, logs: Sequence[LogFacts]) -> Iterator[Diagnosis]:
    """Answers of 5xx, by the code that the client got."""
    for log in logs:
        errors = [request for request in log.requests if request.status >= 500]
        for error, count in Counter(request.error for request in errors).most_common(3):
            lines = tuple(log.evidence(request.text) for request in errors if request.error == error)
            yield Diagnosis(
                "requests-failed",
                (log.process,),
                f"{count} requests were answered with an error of the server: {error or 'no message'}",
                "look at the engine that the line names, at that time; a role without a ready engine gives 503",
                lines,
                times=count,
            )


def long_queues(records: RunRecords, logs: Sequence[LogFacts]) -> Iterator[Diagnosis]:
    """Half of the requests wait for a place for more than a second."""
    for log in logs:
        waits = [request for request in log.requests if request.queue_ms is not None]
        if len(waits) < _SOME:
            continue
        typical = median(request.queue_ms or 0.0 for request in waits)
        if typical > _LONG_WAIT_MS:
            longest = max(waits, key=lambda request: request.queue_ms or 0.0)
            yield Diagnosis(
                "proxy-queue",
                (log.process,),
                f"half of the requests wait {typical / 1000:.1f} s or longer for a place in a pool",
                "add instances of the role that is full (kv-memory-full, pool-starves); or raise "
                "proxy.admission.*.max_requests if its engines have room",
                (log.evidence(longest.text),),
            )


def saturated_proxy(records: RunRecords, _: Sequence[LogFacts]) -> Iterator[Diagnosis]:
    """A process of the proxy that uses a whole CPU, or would if the host had one for it."""
    pressure = records.live.pressure.get("proxy")
    used, wanted = (pressure.busiest_share or 0.0, pressure.wanted_share or 0.0) if pressure is not None else (0, 0)
    if used < _BUSY_SHARE and wanted < _WANTED_SHARE:
        return
    workers = records.plan.proxy.processes if records.plan is not None else 1
    starved = used < _BUSY_SHARE / 2
    cause = (
        f"a process of the proxy had work all the time and got {used:.0%} of a CPU: other processes have the CPUs of "
        "its host, and requests wait"
        if starved
        else f"a process of the proxy used {used:.0%} of a CPU: requests wait for its event loop"
    )
    yield Diagnosis(
        "proxy-saturated",
        ("proxy",),
        cause,
        "leave CPUs to the proxy: fewer engines' threads (OMP_NUM_THREADS), or another host"
        if starved
        else "use more processes, if the host has CPUs for them",
        (EvidenceLine("/proc of proxy", "", f"{used:.0%} of a CPU used, {wanted:.0%} wanted, over a second"),),
        setting="" if starved else f"proxy.workers={workers + 1}",
    )


def idle_workers(records: RunRecords, _: Sequence[LogFacts]) -> Iterator[Diagnosis]:
    """Engines that the proxy sends nothing to, in a deployment that serves."""
    proxy = records.live.proxy
    if proxy is None or not proxy.not_ready or records.phase not in ("ready", "degraded"):
        return
    yield Diagnosis(
        "engine-left-routing",
        tuple(proxy.not_ready),
        "the proxy sends it no requests",
        "pdserve status has the reason beside it; pdserve restart PROCESS starts it again",
        (EvidenceLine("/metrics of proxy", "", f"worker_ready 0: {', '.join(proxy.not_ready)}"),),
    )
