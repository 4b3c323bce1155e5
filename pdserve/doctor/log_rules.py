"""What the logs show: the cause of each death, known lines, preemptions, a full pool, failed and slow transfers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from pdserve.doctor.diagnosis import Diagnosis, EvidenceLine
from pdserve.doctor.engine_lines import of_a_rank
from pdserve.doctor.history import Event, events_of, evidence_of, number, text
from pdserve.doctor.log_facts import LogFacts
from pdserve.doctor.records import RunRecords
from pdserve.doctor.settings import fewer_sequences, filled
from pdserve.logs.causes import Hint, explain
from pdserve.logs.lines import may_name_cause
from pdserve.roles import is_engine

_FULL = 0.95
"""KV use from which requests wait for blocks."""
_INTERVALS = 3
"""Of ten seconds, at one rank: a shorter peak is no fault."""
_LIMITS = {
    "setup": "setup_seconds",
    "weights": "weights_seconds",
    "lmcache": "lmcache_seconds",
    "mooncake-master": "store_master_seconds",
    "proxy": "proxy_seconds",
}
"""Role -> the key of `timeouts` that limits its start; any other is an engine."""
_SLOW = 0.5
"""Of the median of the other engines of the role."""


def deaths(records: RunRecords, logs: Sequence[LogFacts]) -> Iterator[Diagnosis]:
    """Every process that died, the last death of each: its log ends with that one, or with the life after it."""
    last = {text(event, "name"): event for event in events_of(records, "died")}
    facts = {each.process: each for each in logs}
    for name, event in last.items():
        log, again = facts.get(name), _lived_again(records, event)
        hint = _why(event, log, records.role(name), again=again)
        yield Diagnosis(
            "process-died",
            (name,),
            f"it died ({text(event, 'how')}): {hint.cause}",
            hint.todo,
            (evidence_of(event), *(() if log is None else _words(log, hint, again=again))),
        )


def late_starts(records: RunRecords, logs: Sequence[LogFacts]) -> Iterator[Diagnosis]:
    """A process that lived and did not become ready in its time."""
    facts = {each.process: each for each in logs}
    for event in events_of(records, "late"):
        name, seconds = text(event, "name"), number(event, "seconds")
        log, again = facts.get(name), _lived_again(records, event)
        hint = _explained(event, log, None, records.role(name), again=again)
        saved = text(event, "diagnostics")
        yield Diagnosis(
            "start-late",
            (name,),
            f"it was not ready after {seconds:.0f} s: "
            + (hint.cause if hint is not None else f"its probe was last answered with {text(event, 'last_answer')}"),
            hint.todo
            if hint is not None
            else (f"{saved} of the run has stacks, children and sockets; " if saved else "")
            + "a slow host needs more time",
            (evidence_of(event), *(() if log is None else _words(log, hint, again=again))),
            setting="" if hint is not None else f"{_limit_of(records.role(name))}={2 * seconds:.0f}",
        )


def _limit_of(role: str) -> str:
    """The key of the recipe that limits a start."""
    return f"timeouts.{_LIMITS.get(role, 'engine_seconds')}"


def _lived_again(records: RunRecords, event: Event) -> bool:
    """Whether its process was started anew after that: then the log ends with another life."""
    after = records.events[records.events.index(event) + 1 :]
    return any(each.get("event") == "started" and text(each, "name") == text(event, "name") for each in after)


def _explained(event: Event, log: LogFacts | None, code: int | None, role: str, *, again: bool) -> Hint | None:
    """By the log, which has what was logged after the report too, or by the report where another life goes on in the
    log."""
    cause, todo = text(event, "cause"), text(event, "todo")
    noted = Hint(cause, todo) if cause and todo else None
    if again:
        return noted
    return explain(() if log is None else log.tail, exit_code=code, role=role) or noted


def _why(event: Event, log: LogFacts | None, role: str, *, again: bool) -> Hint:
    code = event.get("code")
    if event.get("out_of_memory"):
        return Hint(
            "the kernel killed it, or a process of it, for memory",
            "ask for less (lmcache.l1_size_gb, VLLM_CPU_KVCACHE_SPACE, fewer instances), or raise the "
            "job's memory limit",
        )
    hint = _explained(event, log, code if isinstance(code, int) else None, role, again=again)
    where = "logs/ of the run" if log is None else log.file
    return hint or Hint("its log names no known cause", f"read the end of {where}")


def _words(log: LogFacts, hint: Hint | None, *, again: bool) -> tuple[EvidenceLine, ...]:
    """The line of the log that names the cause, else its last line that may be about a failure, if that is of the same
    life."""
    lines = [line for line in log.tail if line.strip() and may_name_cause(line)]
    named = (line for line in lines if hint is not None and explain([line], exit_code=None, role=log.role) == hint)
    line = next(named, lines[-1] if lines and not again else None)
    return () if line is None else (log.evidence(line),)


def symptoms(records: RunRecords, logs: Sequence[LogFacts]) -> Iterator[Diagnosis]:
    """The lines of logs/symptoms.py."""
    gone = sorted(
        name
        for event in (*events_of(records, "died"), *events_of(records, "unresponsive"))
        if records.role(name := text(event, "name")) == "decode"
    )
    for log in logs:
        for seen in log.seen:
            if seen.symptom.name == "kv-never-fetched" and gone:
                yield Diagnosis(
                    "kv-never-fetched",
                    (log.process,),
                    f"prefill gave up KV that no decode had: {', '.join(dict.fromkeys(gone))} had died or stood still",
                    "remove the cause of that (process-died, process-silent)",
                    (seen.first,),
                    times=seen.times,
                )
                continue
            yield Diagnosis(
                seen.symptom.name,
                (log.process,),
                seen.hint.cause,
                seen.hint.todo,
                (seen.first,),
                setting=filled(seen.symptom.setting, records),
                times=seen.times,
            )


def preemptions(records: RunRecords, logs: Sequence[LogFacts]) -> Iterator[Diagnosis]:
    """Requests that lost their KV blocks to others and were computed again."""
    for log in logs:
        hit = [load for load in log.loads if load.preemptions]
        if hit and is_engine(log.role):
            count = sum(load.preemptions for load in hit)
            yield Diagnosis(
                "preemptions",
                (log.process,),
                f"{count} requests lost their KV blocks to others and were computed again: more requests run at once "
                "than its KV memory holds",
                "let fewer requests run at once, or give it more KV memory (gpu-memory-utilization, more devices)",
                tuple(log.evidence(load.text) for load in hit),
                setting=fewer_sequences(records, log.role),
                times=count,
            )


def full_pools(records: RunRecords, logs: Sequence[LogFacts]) -> Iterator[Diagnosis]:
    """Requests that wait while the KV memory of their engine is full, and no preemption shows it."""
    for log in logs:
        full = of_a_rank(load for load in log.loads if load.kv_usage >= _FULL and load.waiting)
        if len(full) >= _INTERVALS and is_engine(log.role):
            yield Diagnosis(
                "kv-memory-full",
                (log.process,),
                f"up to {max(load.waiting for load in full)} requests waited while its KV memory was full",
                f"add instances of {log.role}, or give it more KV memory (gpu-memory-utilization, more devices)",
                tuple(log.evidence(load.text) for load in full),
                setting=filled(f"{log.role}.instances+1", records),
                times=len(full),
            )


def starved_pools(records: RunRecords, logs: Sequence[LogFacts]) -> Iterator[Diagnosis]:
    """Requests wait at every engine of one role while the other role has nothing to do."""
    for busy, idle in (("prefill", "decode"), ("decode", "prefill")):
        waiting = {log.process: [load for load in log.loads if load.waiting] for log in logs if log.role == busy}
        others = [load for log in logs if log.role == idle for load in log.loads]
        queued = all(len(of_a_rank(hits)) >= _INTERVALS for hits in waiting.values())
        room = others and median(load.running for load in others) == 0 and not any(load.waiting for load in others)
        if not waiting or not queued or not room:
            continue
        evidence = [log.evidence(waiting[log.process][0].text) for log in logs if log.process in waiting]
        yield Diagnosis(
            "pool-starves",
            tuple(waiting),
            f"requests wait at every {busy} while {idle} has nothing to do: {busy} is too small for this load",
            f"move instances from {idle} to {busy}, or add instances of {busy}",
            tuple(evidence),
            setting=filled(f"{busy}.instances+1", records),
        )


def failed_transfers(_: RunRecords, logs: Sequence[LogFacts]) -> Iterator[Diagnosis]:
    """What the engine itself counts; the line with the reason is a symptom of its own."""
    for log in logs:
        failed = [each for each in log.transfers if each.failed or each.expired]
        if failed:
            count = sum(each.failed + each.expired for each in failed)
            done = sum(each.done for each in log.transfers)
            yield Diagnosis(
                "transfers-failed",
                (log.process,),
                f"{count} transfers of KV failed or came too late, {done} succeeded; each costs its prompt once more, "
                "or its request",
                "the other causes of this engine have the reason; pdserve preflight RECIPE checks addresses and RDMA",
                tuple(log.evidence(each.text) for each in failed),
                times=count,
            )


def slow_rails(_: RunRecords, logs: Sequence[LogFacts]) -> Iterator[Diagnosis]:
    """An engine that moves KV at less than half the rate of the others of its role."""
    rates: dict[str, tuple[LogFacts, float]] = {}
    for log in logs:
        measured = [each for each in log.transfers if each.megabytes_a_second is not None]
        if len(of_a_rank(measured)) >= _INTERVALS:
            rates[log.process] = (log, median(each.megabytes_a_second or 0.0 for each in measured))
    for name, (log, rate) in rates.items():
        others = [other for key, (peer, other) in rates.items() if key != name and peer.role == log.role]
        if others and rate < _SLOW * median(others):
            yield Diagnosis(
                "slow-rail",
                (name,),
                f"it moves KV at {rate:.0f} MB/s, the other engines of its role at {median(others):.0f} MB/s",
                "compare its NIC with theirs (ibstat, ethtool: speed, errors, NUMA node of the device), and name a "
                "fast NIC in device_name of the mooncake connector",
                tuple(log.evidence(each.text) for each in log.transfers[-1:]),
            )
