"""What the history of a run shows: restarts, silence, lost nodes and lost records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdserve.doctor.diagnosis import Diagnosis, EvidenceLine
from pdserve.doctor.history import HISTORY, Event, clock, events_of, evidence_of, number, text
from pdserve.doctor.log_facts import LogFacts
from pdserve.doctor.records import RunRecords


def lost_launcher(records: RunRecords, _: Sequence[LogFacts]) -> Iterator[Diagnosis]:
    """The launcher ended without recording an end, or is not heard."""
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
    """A process that is started again and again."""
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
    """A process that stopped answering while it lived."""
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
    """An engine that had no socket left."""
    for event in events_of(records, "out_of_sockets"):
        yield Diagnosis(
            "out-of-sockets",
            (text(event, "name"),),
            f"it had no socket or file descriptor left, {number(event, 'times'):.0f} times; its requests failed",
            text(event, "todo") or "raise `ulimit -n` where pdserve is started, then start again",
            (evidence_of(event),),
        )


def cache_servers(records: RunRecords, _: Sequence[LogFacts]) -> Iterator[Diagnosis]:
    """An LMCache server that was down, and the engines that waited for it."""
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
    """An agent that is gone, and what it took along."""
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
    """Parts of the evidence are missing, so that a cause may not be seen."""
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
    """The error of a run that failed for another reason than a death: its own words are the best there are."""
    if records.failure is None or any(events_of(records, name) for name in ("died", "late", "agent_gone")):
        return
    what = records.failure.what + (f": {records.failure.cause}" if records.failure.cause else "")
    todo = records.failure.todo or "failure.md of the run has the evidence"
    evidence = (EvidenceLine("failure.md", "", records.failure.what),)
    if events_of(records, "up"):
        yield Diagnosis("ended-with-error", (), what, todo, evidence)
    else:
        yield Diagnosis("start-failed", (), what, todo, evidence)
