"""The table of rules, the deadliest first, and the function that asks all of them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from pdserve.doctor import cache_rules, event_rules, live_rules, log_rules, proxy_rules
from pdserve.doctor.diagnosis import Diagnosis, merged
from pdserve.doctor.log_facts import LogFacts, reduced
from pdserve.doctor.records import ProcessLog, RunRecords

Rule = Callable[[RunRecords, Sequence[LogFacts]], Iterator[Diagnosis]]

RULES: tuple[Rule, ...] = (
    # Why did it fail?
    log_rules.deaths,
    log_rules.late_starts,
    event_rules.failed_starts,
    event_rules.lost_launcher,
    event_rules.lost_nodes,
    event_rules.cache_servers,
    event_rules.restarts,
    event_rules.silences,
    event_rules.sockets,
    live_rules.unanswered,
    # Why do requests fail?
    log_rules.failed_transfers,
    live_rules.counted_failures,
    log_rules.symptoms,
    proxy_rules.failed_requests,
    proxy_rules.busy_pools,
    proxy_rules.idle_workers,
    # Why is it slow?
    cache_rules.kv_not_moved,
    cache_rules.cache_never_hits,
    log_rules.preemptions,
    live_rules.counted_preemptions,
    log_rules.full_pools,
    log_rules.starved_pools,
    proxy_rules.long_queues,
    proxy_rules.saturated_proxy,
    log_rules.slow_rails,
    live_rules.swapping,
    live_rules.throttled_cpus,
    # What may hide another cause?
    event_rules.lost_records,
)


def diagnose(records: RunRecords, logs: Iterable[ProcessLog]) -> list[Diagnosis]:
    """Every cause that a rule sees, each once. Of each log only what the rules ask for is kept in memory."""
    facts = [reduced(log) for log in logs]
    return merged(each for rule in RULES for each in rule(records, facts))
