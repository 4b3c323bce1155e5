"""Name the causes that a run shows: one function for each, the table of them, and the question to all. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from pdserve.doctor.log_facts import LogFacts, busiest_rank, reduce_log
from pdserve.doctor.records import (
    HISTORY,
    Diagnosis,
    Event,
    EvidenceLine,
    ProcessLog,
    RunRecords,
    clock,
    events_of,
    evidence_of,
    fewer_sequences,
    fill_setting,
    less_memory,
    merge_diagnoses,
    number,
    text,
    value_at,
)
from pdserve.logs.causes import Hint, explain
from pdserve.logs.lines import may_name_cause
from pdserve.printable import size_text
from pdserve.roles import is_engine
from pdserve.system.pressure import SWAPPED_ENOUGH


def lost_launcher(records: RunRecords, _: Sequence[LogFacts]) -> Iterator[Diagnosis]:
    """Diagnose a launcher that ended without recording an end, or is not heard."""
    if records.phase not in ("lost", "unresponsive"):
        return
    name = records.state.name if records.state is not None else "NAME"
    launcher = f"launcher PID {records.state.launcher.pid} on {records.state.host}" if records.state else "launcher"
    last = records.events[-1:] if records.events else ()
    gone = records.phase == "lost"
    yield Diagnosis(
        "launcher-lost",
        (),
        f"the {launcher} " + ("was killed, or its host was booted again" if gone else "stands still, or was killed"),
        f"pdserve down {name} clears up what is left; then start it again (pdserve up --detach outlives a logout)",
        tuple(evidence_of(event) for event in last) or (EvidenceLine("state.json", "", f"phase {records.phase}"),),
    )


def restarts(records: RunRecords, _: Sequence[LogFacts]) -> Iterator[Diagnosis]:
    """Diagnose a process that is started again and again."""
    attempts: dict[str, list[Event]] = {}
    for event in events_of(records, "restarting"):
        attempts.setdefault(text(event, "name"), []).append(event)
    for name, events in attempts.items():
        if len(events) > 1:
            yield Diagnosis(
                "restarts",
                (name,),
                f"it was restarted {len(events)} times: what ends it is still there",
                "remove the cause of its deaths (process-died); restarts only hide it",
                tuple(evidence_of(event) for event in events),
                times=len(events),
            )


def silences(records: RunRecords, _: Sequence[LogFacts]) -> Iterator[Diagnosis]:
    """Diagnose a process that stopped answering while it lived."""
    for event in events_of(records, "unresponsive"):
        yield Diagnosis(
            "process-silent",
            (text(event, "name"),),
            f"it stopped answering while it lived: {text(event, 'why')}",
            "its log at that time, and diagnostics/ of the run, show what it did: a long step, a stopped process "
            "(SIGSTOP), or no CPU",
            (evidence_of(event),),
        )


def sockets(records: RunRecords, _: Sequence[LogFacts]) -> Iterator[Diagnosis]:
    """Diagnose an engine that had no socket left."""
    for event in events_of(records, "out_of_sockets"):
        yield Diagnosis(
            "out-of-sockets",
            (text(event, "name"),),
            f"it had no socket or file descriptor left, {number(event, 'times'):.0f} times; its requests failed",
            text(event, "todo") or "raise `ulimit -n` where pdserve is started, then start again",
            (evidence_of(event),),
        )


def cache_servers(records: RunRecords, _: Sequence[LogFacts]) -> Iterator[Diagnosis]:
    """Diagnose an LMCache server that was down, and the engines that waited for it."""
    for event in events_of(records, "cache_down"):
        engines = event.get("engines")
        served = ", ".join(map(str, engines)) if isinstance(engines, list) else "its engines"
        yield Diagnosis(
            "cache-server-down",
            (text(event, "name"),),
            f"the LMCache server was down, and {served} got no requests meanwhile",
            "remove the cause of its death (process-died); what was in L1 is lost, what is in lmcache.l2 is not",
            (evidence_of(event),),
        )


def lost_nodes(records: RunRecords, _: Sequence[LogFacts]) -> Iterator[Diagnosis]:
    """Diagnose an agent that is gone, and what it took along."""
    for event in events_of(records, "agent_gone"):
        yield Diagnosis(
            "node-lost",
            (),
            f"the agent of {text(event, 'node')} is gone: {text(event, 'how')}; all processes of that node ended",
            "look at that node: was it booted again, did its job end (sacct), was the agent killed (dmesg)?",
            (evidence_of(event),),
        )
    for event in events_of(records, "signal_received"):
        yield Diagnosis(
            "ended-from-outside",
            (),
            f"the agent of {text(event, 'node')} was ended from outside ({text(event, 'signal')})",
            "look for the time limit or the preemption of a batch job, a service manager, another shell",
            (evidence_of(event),),
        )


def lost_records(records: RunRecords, _: Sequence[LogFacts]) -> Iterator[Diagnosis]:
    """Diagnose missing parts of the evidence, without which a cause may not be seen."""
    for event in events_of(records, "log_cut"):
        yield Diagnosis(
            "log-lost",
            (text(event, "name"),),
            f"{int(number(event, 'lost')) >> 20} MiB of its log are lost: {text(event, 'why')}",
            "make room on that disk (pdserve list --prune removes old runs)",
            (evidence_of(event),),
        )
    for event in events_of(records, "unreadable"):
        yield Diagnosis(
            "record-unreadable",
            (),
            "a line of the history cannot be read: the disk was full, or the file was changed by hand",
            "the other lines still count; make room on the disk of the run directory",
            (EvidenceLine(HISTORY, clock(event), text(event, "text")),),
        )
    for reason in records.unread:
        yield Diagnosis(
            "record-unreadable",
            (),
            "a record of the run cannot be read, so that what it has is not known here",
            "read the reason; a run of another version is read by that version",
            (EvidenceLine(records.run_dir, "", reason),),
        )


def failed_starts(records: RunRecords, _: Sequence[LogFacts]) -> Iterator[Diagnosis]:
    """Diagnose the error of a run that failed for another reason than a death: its own words are the best there are."""
    if records.failure is None or any(events_of(records, name) for name in ("died", "late", "agent_gone")):
        return
    what = records.failure.what + (f": {records.failure.cause}" if records.failure.cause else "")
    todo = records.failure.todo or "failure.md of the run has the evidence"
    evidence = (EvidenceLine("failure.md", "", records.failure.what),)
    if events_of(records, "up"):
        yield Diagnosis("ended-with-error", (), what, todo, evidence)
    else:
        yield Diagnosis("start-failed", (), what, todo, evidence)


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
    """Diagnose every process that died, the last death of each: its log ends with that one, or with the life after
    it."""
    last = {text(event, "name"): event for event in events_of(records, "died")}
    facts = {each.process: each for each in logs}
    for name, event in last.items():
        log, again = facts.get(name), _lived_again(records, event)
        hint = _death_hint(event, log, records.role(name), again=again)
        yield Diagnosis(
            "process-died",
            (name,),
            f"it died ({text(event, 'how')}): {hint.cause}",
            hint.todo,
            (evidence_of(event), *(() if log is None else _words(log, hint, again=again))),
        )


def late_starts(records: RunRecords, logs: Sequence[LogFacts]) -> Iterator[Diagnosis]:
    """Diagnose a process that lived and did not become ready in its time."""
    facts = {each.process: each for each in logs}
    for event in events_of(records, "late"):
        name, seconds = text(event, "name"), number(event, "seconds")
        log, again = facts.get(name), _lived_again(records, event)
        hint = _explain_death(event, log, None, records.role(name), again=again)
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
    """Return the key of the recipe that limits a start."""
    return f"timeouts.{_LIMITS.get(role, 'engine_seconds')}"


def _lived_again(records: RunRecords, event: Event) -> bool:
    """Tell whether the process of an event was started anew after it: then the log ends with another life."""
    after = records.events[records.events.index(event) + 1 :]
    return any(each.get("event") == "started" and text(each, "name") == text(event, "name") for each in after)


def _explain_death(event: Event, log: LogFacts | None, code: int | None, role: str, *, again: bool) -> Hint | None:
    """Explain a death by the log, which has what was logged after the report too, or by the report where another life
    goes on in the log."""
    cause, todo = text(event, "cause"), text(event, "todo")
    noted = Hint(cause, todo) if cause and todo else None
    if again:
        return noted
    return explain(() if log is None else log.tail, exit_code=code, role=role) or noted


def _death_hint(event: Event, log: LogFacts | None, role: str, *, again: bool) -> Hint:
    code = event.get("code")
    if event.get("out_of_memory"):
        return Hint(
            "the kernel killed it, or a process of it, for memory",
            "ask for less (lmcache.l1_size_gb, VLLM_CPU_KVCACHE_SPACE, fewer instances), or raise the "
            "job's memory limit",
        )
    hint = _explain_death(event, log, code if isinstance(code, int) else None, role, again=again)
    where = "logs/ of the run" if log is None else log.file
    return hint or Hint("its log names no known cause", f"read the end of {where}")


def _words(log: LogFacts, hint: Hint | None, *, again: bool) -> tuple[EvidenceLine, ...]:
    """Return the line of the log that names the cause, else its last line that may be about a failure, if that is of
    the same life."""
    lines = [line for line in log.tail if line.strip() and may_name_cause(line)]
    named = (line for line in lines if hint is not None and explain([line], exit_code=None, role=log.role) == hint)
    line = next(named, lines[-1] if lines and not again else None)
    return () if line is None else (log.evidence(line),)


def symptoms(records: RunRecords, logs: Sequence[LogFacts]) -> Iterator[Diagnosis]:
    """Diagnose what lines of the logs show (logs/symptoms.py)."""
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
                setting=fill_setting(seen.symptom.setting, records),
                times=seen.times,
            )


def preemptions(records: RunRecords, logs: Sequence[LogFacts]) -> Iterator[Diagnosis]:
    """Diagnose requests that lost their KV blocks to others and were computed again."""
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
    """Diagnose requests that wait while the KV memory of their engine is full, and no preemption shows it."""
    for log in logs:
        full = busiest_rank(load for load in log.loads if load.kv_usage >= _FULL and load.waiting)
        if len(full) >= _INTERVALS and is_engine(log.role):
            yield Diagnosis(
                "kv-memory-full",
                (log.process,),
                f"up to {max(load.waiting for load in full)} requests waited while its KV memory was full",
                f"add instances of {log.role}, or give it more KV memory (gpu-memory-utilization, more devices)",
                tuple(log.evidence(load.text) for load in full),
                setting=fill_setting(f"{log.role}.instances+1", records),
                times=len(full),
            )


def starved_pools(records: RunRecords, logs: Sequence[LogFacts]) -> Iterator[Diagnosis]:
    """Diagnose requests that wait at every engine of one role while the other role has nothing to do."""
    for busy, idle in (("prefill", "decode"), ("decode", "prefill")):
        waiting = {log.process: [load for load in log.loads if load.waiting] for log in logs if log.role == busy}
        others = [load for log in logs if log.role == idle for load in log.loads]
        queued = all(len(busiest_rank(hits)) >= _INTERVALS for hits in waiting.values())
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
            setting=fill_setting(f"{busy}.instances+1", records),
        )


def failed_transfers(_: RunRecords, logs: Sequence[LogFacts]) -> Iterator[Diagnosis]:
    """Find failed transfers that the engine itself counts; the line with the reason is a symptom of its own."""
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
    """Diagnose an engine that moves KV at less than half the rate of the others of its role."""
    rates: dict[str, tuple[LogFacts, float]] = {}
    for log in logs:
        measured = [each for each in log.transfers if each.megabytes_a_second is not None]
        if len(busiest_rank(measured)) >= _INTERVALS:
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


_BUSY = re.compile(r"The (?P<pool>\w+) pool is busy")
_LONG_WAIT_MS = 1000.0
_SOME = 10
"""Requests from which a median means something."""
_BUSY_SHARE = 0.9
"""Of a CPU: an event loop that uses so much has no room for another request."""
_WANTED_SHARE = 0.8
"""Of the time, in which it ran or waited for a CPU."""


def busy_pools(records: RunRecords, logs: Sequence[LogFacts]) -> Iterator[Diagnosis]:
    """Diagnose requests that were refused because a pool was full."""
    for log in logs:
        refused: dict[str, list[EvidenceLine]] = {}
        for request in log.requests:
            if request.status == 429 and (match := _BUSY.search(request.error)) is not None:
                refused.setdefault(match["pool"], []).append(log.evidence(request.text))
        for pool, lines in refused.items():
            yield _busy_pool(records, log.process, pool, len(lines), tuple(lines))
    proxy = records.live.proxy
    if proxy is not None and not any(log.requests for log in logs):
        for pool, count in proxy.rejected.items():
            if count:
                line = EvidenceLine("/metrics of proxy", "", f"admission_rejections of the {pool} pool: {count}")
                yield _busy_pool(records, "proxy", pool, count, (line,))


def _busy_pool(
    records: RunRecords, process: str, pool: str, count: int, evidence: tuple[EvidenceLine, ...]
) -> Diagnosis:
    more = fill_setting(f"{pool}.instances+1", records)
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
    """Diagnose long queues: half of the requests wait for a place for more than a second."""
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
    """Diagnose a process of the proxy that uses a whole CPU, or would if the host had one for it."""
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
    """Diagnose engines that the proxy sends nothing to, in a deployment that serves."""
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


_SILENT_INTERVALS = 6
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
    """Diagnose an engine with LMCache that has computed prompts for a minute and loaded nothing."""
    evidence = {log.process: lines for log in logs if (lines := _silent_cache(records, log))}
    for name, engine in records.live.engines.items():
        if (
            name in _caching_engines(records)
            and (engine.external_queries or 0) >= _TOKENS
            and engine.external_hits == 0
        ):
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
    """Diagnose a decode that computes its prompts itself: answers are right, and disaggregation does nothing."""
    for log in logs:
        loads = [load for load in log.loads if load.prompt_rate > 0 and load.external_hits is not None]
        long = len(busiest_rank(loads)) >= _SILENT_INTERVALS
        if log.role == "decode" and long and not any(load.external_hits for load in loads):
            yield Diagnosis(
                "kv-not-moved",
                (log.process,),
                "decode received no KV from prefill: it computes every prompt itself",
                "send requests to the proxy only, and let pdserve verify prove the transfer",
                tuple(log.evidence(load.text) for load in loads[:2]),
            )


def _caching_engines(records: RunRecords) -> set[str]:
    """Return the engines that attach to LMCache and load from it."""
    processes = records.plan.processes if records.plan is not None else ()
    return {process.name for process in processes if process.lmcache is not None and process.role != "decode"}


def _silent_cache(records: RunRecords, log: LogFacts) -> tuple[EvidenceLine, ...]:
    loads = [load for load in log.loads if load.prompt_rate > 0 and load.external_hits is not None]
    if log.process not in _caching_engines(records) or any(load.external_hits for load in loads):
        return ()
    if len(busiest_rank(loads)) < _SILENT_INTERVALS:
        return ()
    if sum(load.prompt_rate for load in loads) * _INTERVAL_SECONDS < _TOKENS:
        return ()
    return tuple(log.evidence(load.text) for load in loads)


def _reason(records: RunRecords, logs: Sequence[LogFacts]) -> _Reason:
    """Return the first of the known reasons that this run shows."""
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
    """Return the reason that most prompts are below a chunk: whole chunks alone are kept."""
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
    """Find that L1 is emptied before a prompt comes again."""
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
        fill_setting("lmcache.l1_size_gb*2", records),
    )


def _salts(records: RunRecords, _: Sequence[LogFacts]) -> _Reason | None:
    """Find that each request has a salt of its own, which keeps all caches apart."""
    for name, cache in records.live.caches.items():
        if cache.salts is not None and cache.salts > 2 and not cache.hit_tokens:
            return _Reason(
                f"its chunks are stored under {cache.salts} different cache_salt values, and none of them came twice",
                "let clients send one cache_salt for each tenant, not for each request",
                (EvidenceLine(f"/metrics of {name}", "", f"lmcache_mp_l1_write_chunks_total of {cache.salts} salts"),),
            )
    return None


_THROTTLED_SHARE = 0.05
"""Of the accounting periods of its cgroup."""


def unanswered(records: RunRecords, _: Sequence[LogFacts]) -> Iterator[Diagnosis]:
    """Diagnose processes that count as ready and do not answer."""
    live = records.live
    answers = {name: (engine.url, engine.error) for name, engine in live.engines.items()}
    answers |= {name: (cache.url, cache.error) for name, cache in live.caches.items()}
    answers |= {name: (store.url, store.error) for name, store in live.stores.items()}
    for name, (url, error) in answers.items():
        if error is not None:
            yield Diagnosis(
                "no-answer",
                (name,),
                f"it counts as ready, and its figures cannot be read: {error}",
                "its log shows what it does; what hangs is treated as dead after timeouts.unresponsive_seconds",
                (EvidenceLine(url, "", error),),
            )


def counted_preemptions(records: RunRecords, logs: Sequence[LogFacts]) -> Iterator[Diagnosis]:
    """Find preemptions in the counters where the log shows none: its lines are off, or were cut off."""
    shown = {log.process for log in logs for load in log.loads if load.preemptions}
    for name, engine in records.live.engines.items():
        role = records.role(name)
        if engine.preemptions and name not in shown and is_engine(role):
            yield Diagnosis(
                "preemptions",
                (name,),
                f"{engine.preemptions} requests lost their KV blocks to others and were computed again: more requests "
                "run at once than its KV memory holds",
                "let fewer requests run at once, or give it more KV memory (gpu-memory-utilization, more devices)",
                (EvidenceLine(f"/metrics of {name}", "", f"vllm:num_preemptions_total {engine.preemptions}"),),
                setting=fewer_sequences(records, role),
                times=engine.preemptions,
            )


def counted_failures(records: RunRecords, logs: Sequence[LogFacts]) -> Iterator[Diagnosis]:
    """Diagnose transfers that failed, and keys that a Mooncake store did not take."""
    shown = {log.process for log in logs if any(each.failed for each in log.transfers)}
    for name, engine in records.live.engines.items():
        if engine.failed_transfers and name not in shown:
            yield Diagnosis(
                "transfers-failed",
                (name,),
                f"{engine.failed_transfers} transfers of KV failed; each costs its prompt once more, or its request",
                "its log has the reason of each; pdserve preflight RECIPE checks addresses and RDMA",
                (EvidenceLine(f"/metrics of {name}", "", f"failed transfers {engine.failed_transfers}"),),
                times=engine.failed_transfers,
            )
        if engine.store is not None and engine.store.failed:
            yield Diagnosis(
                "store-failed",
                (name,),
                f"the Mooncake store did not take or give {engine.store.failed} keys: its pool is full, or its master "
                "cannot be reached",
                "pdserve status shows how full the pool is; give it more memory in the connector's section",
                (EvidenceLine(f"/metrics of {name}", "", f"failed keys {engine.store.failed}"),),
                times=engine.store.failed,
            )


def swapping(records: RunRecords, _: Sequence[LogFacts]) -> Iterator[Diagnosis]:
    """Diagnose memory of a process that was written to a disk: now, or as its agent has recorded it."""
    recorded: dict[str, Event] = {text(event, "name"): event for event in events_of(records, "swapped")}
    now = {name: each.swapped_bytes for name, each in records.live.pressure.items()}
    for name in dict.fromkeys((*recorded, *now)):
        event = recorded.get(name)
        swapped = max(now.get(name, 0), 0 if event is None else int(number(event, "bytes")))
        if swapped < SWAPPED_ENOUGH:
            continue
        size, read = size_text(swapped), 0 if event is None else int(number(event, "read_back"))
        again = f", and its node has read {size_text(read)} back" if read else ""
        shown = (EvidenceLine(f"/proc of {name}", "", f"VmSwap {size}"),) if now.get(name, 0) else ()
        yield Diagnosis(
            "swapping",
            (name,),
            f"{size} of its memory were swapped out to a disk{again}: "
            "the host has too little memory for what runs on it",
            "free memory, or ask for less (lmcache.l1_size_gb, VLLM_CPU_KVCACHE_SPACE, fewer instances); "
            "swapoff -a makes a lack of memory a clear error",
            (*(() if event is None else (evidence_of(event),)), *shown),
            setting=less_memory(records, records.role(name), swapped),
        )


def throttled_cpus(records: RunRecords, _: Sequence[LogFacts]) -> Iterator[Diagnosis]:
    """Diagnose a CPU limit of a container or a job that is reached again and again."""
    for name, pressure in records.live.pressure.items():
        if not pressure.periods or pressure.throttled_seconds is None:
            continue
        share = pressure.throttled_periods / pressure.periods
        if share >= _THROTTLED_SHARE:
            yield Diagnosis(
                "cpu-throttled",
                (name,),
                f"its CPU limit was reached in {share:.0%} of all periods: it has waited "
                f"{pressure.throttled_seconds:.0f} s for CPU time",
                "raise the limit: --cpus of the container, --cpus-per-task of the job, CPUQuota of the unit",
                (
                    EvidenceLine(
                        f"cpu.stat of {name}",
                        "",
                        f"nr_throttled {pressure.throttled_periods} of nr_periods {pressure.periods}",
                    ),
                ),
            )


Rule = Callable[[RunRecords, Sequence[LogFacts]], Iterator[Diagnosis]]

RULES: tuple[Rule, ...] = (
    # Why did it fail?
    deaths,
    late_starts,
    failed_starts,
    lost_launcher,
    lost_nodes,
    cache_servers,
    restarts,
    silences,
    sockets,
    unanswered,
    # Why do requests fail?
    failed_transfers,
    counted_failures,
    symptoms,
    failed_requests,
    busy_pools,
    idle_workers,
    # Why is it slow?
    kv_not_moved,
    cache_never_hits,
    preemptions,
    counted_preemptions,
    full_pools,
    starved_pools,
    long_queues,
    saturated_proxy,
    slow_rails,
    swapping,
    throttled_cpus,
    # What may hide another cause?
    lost_records,
)


def diagnose(records: RunRecords, logs: Iterable[ProcessLog]) -> list[Diagnosis]:
    """Return every cause that a rule sees, each once. Of each log only what the rules ask for is kept in memory."""
    facts = [reduce_log(log) for log in logs]
    return merge_diagnoses(each for rule in RULES for each in rule(records, facts))
