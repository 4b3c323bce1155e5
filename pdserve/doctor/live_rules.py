"""What the processes of a deployment that lives report now: figures that no log has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdserve.doctor.diagnosis import Diagnosis, EvidenceLine
from pdserve.doctor.history import Event, events_of, evidence_of, number, text
from pdserve.doctor.log_facts import LogFacts
from pdserve.doctor.records import RunRecords
from pdserve.doctor.settings import fewer_sequences, less_memory
from pdserve.printable import size_text
from pdserve.roles import is_engine
from pdserve.system.pressure import SWAPPED_ENOUGH

_THROTTLED_SHARE = 0.05
"""Of the accounting periods of its cgroup."""


def unanswered(records: RunRecords, _: Sequence[LogFacts]) -> Iterator[Diagnosis]:
    """Processes that count as ready and do not answer."""
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
    """Where the log shows none: its lines are off, or were cut off."""
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
    """Transfers that failed, and keys that a Mooncake store did not take."""
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
    """Memory of a process that was written to a disk: now, or as its agent has recorded it."""
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
    """A CPU limit of a container or a job that is reached again and again."""
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
