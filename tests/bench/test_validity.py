"""Each reason for INVALID: evidence that gives it, and evidence close to it that does not."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pdserve.bench.snapshot import ENGINE, PROXY, Clocks, Counts, CpuSample, CpuUse, counts, cpu_use
from pdserve.bench.validity import CHECKS, Evidence, Invalid, Unknown, judge
from pdserve.bench.workload import Load, Workload
from pdserve.observe.metrics import samples_of
from tests.bench.evidence import INPUT, OUTPUT, REQUESTS, TOKENS, counted, healthy, plan, record, with_connector
from tests.tables import each_row

Change = Callable[[Evidence], Evidence]


def failed(count: int, share: float = 0.0) -> Change:
    """So many of the requests have failed, and that share may."""

    def change(evidence: Evidence) -> Evidence:
        bad = [record(ok=False, output_tokens=0, error="Internal Server Error") for _ in range(count)]
        return replace(
            evidence,
            records=(*bad, *evidence.records[count:]),
            workload=evidence.workload.model_copy(update={"max_failed": share}),
        )

    return change


def first(**fields: Any) -> Change:
    """The first record is another."""
    return lambda evidence: replace(evidence, records=(record(**fields), *evidence.records[1:]))


def count(process: str, **values: float) -> Change:
    return lambda evidence: counted(evidence, process, **values)


def after(**fields: Any) -> Change:
    return lambda evidence: replace(evidence, after=evidence.after.model_copy(update=fields))


def before(**fields: Any) -> Change:
    return lambda evidence: replace(evidence, before=evidence.before.model_copy(update=fields))


def timed(answered: int, cut: int, grace: float | None) -> Change:
    """A load that was limited by time, at whose end so many requests were open."""
    open_ones = (record(ok=False, cut=True, output_tokens=0, prompt_tokens=0),) * cut
    load = Load(requests=99, concurrency=16, seconds=5, grace_seconds=grace)
    return lambda evidence: replace(evidence, load=load, records=(*evidence.records[:answered], *open_ones))


def traced(evidence: Evidence) -> Evidence:
    """Replayed from a trace with lengths, all of which were kept."""
    records = tuple(replace(each, asked_output=OUTPUT) for each in evidence.records)
    return replace(evidence, workload=Workload(trace="t.jsonl"), records=records, asked_input=TOKENS)


def having(**fields: Any) -> Change:
    return lambda evidence: replace(evidence, **fields)


def unread(process: str) -> Change:
    """The process did not answer before the first request, and had counted much until then."""
    slow = Counts(error="no answer within 3 s")

    def change(evidence: Evidence) -> Evidence:
        before = evidence.before
        if process == "proxy":
            return replace(evidence, before=before.model_copy(update={"proxy": slow}))
        field = "engines" if process in before.engines else "caches"
        parts = {**getattr(before, field), process: slow}
        return replace(evidence, before=before.model_copy(update={field: parts}))

    return change


def page_of_proxy(path: str, answered: int) -> Change:
    """The proxy has answered the client's requests, and so many of this path."""
    series = 'pdserve_proxy_requests_total{path="%s",status="200"} %d\n'
    text = series % ("/v1/completions", 7 + REQUESTS) + series % (path, answered)
    return after(proxy=counts(samples_of(text), PROXY))


def page_of_mooncake(transfers: int, receives: int, expired: int = 0) -> Change:
    """Of a decode with vllm 0.33, or before with the patch mooncake-prom-metrics, at the end: so many have failed."""
    text = f"""
vllm:mooncake_num_failed_transfers_total{{engine="0"}} {transfers}
vllm:mooncake_num_failed_recvs_total{{engine="0"}} {receives}
vllm:mooncake_num_kv_expired_reqs_total{{engine="0"}} {expired}
vllm:prompt_tokens_by_source_total{{engine="0",source="local_compute"}} 3
vllm:prompt_tokens_by_source_total{{engine="0",source="external_kv_transfer"}} {5 + TOKENS}
"""
    page = counts(samples_of(text), ENGINE)
    return lambda evidence: after(engines={**evidence.after.engines, "decode-0": page})(evidence)


def event(kind: str) -> Change:
    return having(events=({"event": kind, "name": "decode-0", "at": 1.0},))


def whole_prompts(evidence: Evidence) -> Evidence:
    """Until the first request decode has received prompts, and computed nothing of them."""
    engines = {**evidence.before.engines, "decode-0": Counts(values={"computed": 0.0, "received": 5.0})}
    return replace(evidence, before=evidence.before.model_copy(update={"engines": engines}))


def both(*changes: Change) -> Change:
    def change(evidence: Evidence) -> Evidence:
        for each in changes:
            evidence = each(evidence)
        return evidence

    return change


def conditional(threshold: int, alone: float) -> Change:
    """The proxy sends prompts below the threshold to decode alone, and has done so with so many."""
    return both(having(plan=plan(conditional=threshold)), count("proxy", single_engine=alone))


def at_rate(rate: float, every: float) -> Change:
    """At a rate, with requests that were sent so many seconds apart."""
    return lambda evidence: replace(
        evidence,
        load=Load(requests=REQUESTS, rate=rate),
        records=tuple(record(started=every * number) for number in range(REQUESTS)),
    )


def of_aiperf(evidence: Evidence) -> Evidence:
    """By AIPerf, whose arrivals are as random as a Poisson process."""
    return replace(evidence, workload=evidence.workload.model_copy(update={"client": "aiperf"}))


def tier(class_name: str, **values: float) -> Change:
    """Mode aggregated, with a cache tier of an engine's own."""

    def change(evidence: Evidence) -> Evidence:
        counts = {"aggregated-0": Counts(values={"computed": TOKENS, **values})}
        return replace(
            evidence,
            plan=with_connector(class_name),
            before=evidence.before.model_copy(update={"engines": {"aggregated-0": Counts(values={"computed": 0.0})}}),
            after=evidence.after.model_copy(update={"engines": counts}),
        )

    return change


def with_l2(**counts: float) -> Change:
    """LMCache has an L2, and counted so much more at the end."""
    some = plan()
    server = some.processes[0].model_copy(update={"name": "lmcache-0", "argv": ("lmcache", "--l2-adapter", "{}")})
    of = some.model_copy(update={"processes": (*some.processes, server)})
    return both(having(plan=of), count("lmcache-0", **counts))


COLD = (record(ok=False, output_tokens=0, error="Internal Server Error"),)
CASES: list[tuple[str, Change, str]] = [
    ("warm-up", having(warmup=(), warmup_problem="it ended with 1"), "it ended with 1"),
    ("warm-up", having(warmup=COLD), "Internal Server Error"),
    ("client", having(client_problem="it ended with 1"), "ended with 1"),
    ("client", lambda e: replace(e, records=e.records[1:]), "19 of 20 requests"),
    ("completed", failed(REQUESTS), "no request was answered"),
    ("errors", failed(1), "1 of 20 requests failed, and 0.0% may (--max-failed), for example: Internal Server Error"),
    ("output-length", first(output_tokens=OUTPUT - 1), "1 of 20 answers"),
    ("output-length", both(traced, first(asked_output=OUTPUT + 1)), "1 of 20 answers"),
    ("prompt-length", first(prompt_tokens=INPUT + 21), "1 of 20 prompts"),
    ("prompt-length", both(traced, having(asked_input=TOKENS // 2)), "the trace asks for 10000"),
    ("decode-computed", count("decode-0", computed=3.0 + REQUESTS + 1), "decode computed 21 prompt tokens itself"),
    ("decode-computed", count("decode-0", computed=3.0 + REQUESTS - 1), "0, or one of each request (20), would be"),
    ("decode-computed", both(whole_prompts, count("decode-0", computed=REQUESTS)), "and 0 would be right"),
    ("decode-computed", both(conditional(100, alone=1.0), count("decode-0", computed=3000.0)), "2997 prompt tokens"),
    ("transfers", count("decode-0", pulls_failed=2.0), "2 Mooncake pulls that failed"),
    ("transfers", count("prefill-0", nixl_expired=1.0), "1 requests whose KV expired"),
    ("transfers", page_of_mooncake(4, 8), "4 Mooncake transfers that failed, 8 prompts that Mooncake did not bring"),
    ("transfers", page_of_mooncake(0, 0, 2), "2 requests whose KV expired on prefill"),
    ("cache", count("lmcache-0", written=5.0), "LMCache is on and stored nothing"),
    ("cache", with_l2(l2_written=0.0), "LMCache's L2 is on and stored nothing"),
    ("cache", tier("MooncakeStoreConnector", store_keys=8.0, store_failed=8.0), "the Mooncake store is on"),
    ("cache", tier("MooncakeStoreConnector"), "the Mooncake store is on and stored nothing"),
    ("cache", tier("OffloadingConnector", offload_bytes=0.0), "host memory is on"),
    ("processes", event("died"), "decode-0 died"),
    ("processes", event("restarting"), "decode-0 is being restarted"),
    ("processes", after(lives={"prefill-0": "1", "decode-0": "9", "proxy": "3"}), "decode-0 is not the process"),
    ("processes", after(phase="degraded"), "the deployment is degraded"),
    ("processes", before(phase="degraded"), "the deployment was degraded when the measurement began"),
    ("client-cpu", having(client=CpuUse(used=0.5, wanted=0.9)), "during 90% of the time"),
    ("rate", at_rate(4.0, every=0.1), "1.9 s to send what 4 requests/s would have sent in 5.0 s"),
    ("rate", at_rate(4.0, every=0.31), "5.9 s to send what 4 requests/s would have sent in 5.0 s"),
    ("rate", both(at_rate(4.0, every=0.6), of_aiperf), "11.4 s to send what 4 requests/s would have sent in 5.0 s"),
    ("clock", after(clocks=Clocks(wall=103.0, monotonic=100.0)), "was set by +3.0 s"),
    ("deployment", having(run_id="run-0"), "another run serves now: run-1"),
    ("deployment", having(plan_digest="of the plan that the benchmark began with"), "another plan was applied"),
    ("tokens", count("prefill-0", computed=11.0 + 10 * TOKENS), "prefill-0 engines counted 200000 prompt tokens"),
    ("tokens", count("prefill-0", computed=11.0 + TOKENS / 2), "and the client knows of 20000"),
    ("tokens", count("decode-0", received=5.0), "the decode-0 engines counted 0 prompt tokens"),
    ("tokens", count("decode-0", generated=9.0 + 50 * REQUESTS * OUTPUT), "10000 answer tokens"),
    ("tokens", count("decode-0", generated=9.0 + REQUESTS * OUTPUT / 2), "100 answer tokens"),
    ("second-attempts", count("proxy", failovers=3.0), "the proxy tried 1 times again, for 20 requests"),
    ("second-attempts", both(failed(0, share=0.1), count("proxy", failovers=5.0)), "tried 3 times again"),
    ("cold-cache", count("prefill-0", computed=11.0, local_hits=6.0 + TOKENS), "20000 of 20000 prompt tokens"),
    ("cold-cache", count("prefill-0", computed=11.0, received=0.6 * TOKENS), "12000 of 20000 prompt tokens"),
    ("cold-cache", count("decode-0", local_hits=0.6 * TOKENS), "12000 of 20000 prompt tokens"),
    ("cold-cache", both(having(theory=0.7), count("prefill-0", local_hits=6.0 + 0.9 * TOKENS)), "and 70% repeat"),
    ("completed", timed(answered=8, cut=12, grace=0.1), "12 of 20 requests were still open when the time was over"),
    ("errors", timed(answered=16, cut=4, grace=0.5), "4 of 20 requests failed"),
    ("errors", timed(answered=16, cut=4, grace=None), "open for at least 30 s at the end"),
    ("deployment", after(run_id="run-2"), "another run serves now: run-2"),
    ("other-traffic", count("proxy", requests=7.0 + REQUESTS + 1), "answered 21 requests, and the client sent 20"),
    ("other-traffic", page_of_proxy("/v1/responses", 1), "answered 21"),
]

CLOSE: list[tuple[str, Change]] = [
    ("transfers", page_of_mooncake(0, 0)),
    ("transfers", count("decode-0", nixl_failed=0.0)),
    ("warm-up", having(warmup=(*COLD, record()))),
    ("errors", failed(2, share=0.1)),
    ("errors", lambda evidence: failed(29, 0.29)(replace(evidence, records=(record(),) * 100))),
    ("prompt-length", first(prompt_tokens=INPUT + 20)),
    ("prompt-length", both(traced, having(asked_input=TOKENS - 1200))),
    ("decode-computed", both(whole_prompts, count("decode-0", computed=0.0))),
    ("decode-computed", having(plan=plan(mode="aggregated"))),
    ("decode-computed", both(conditional(2000, alone=REQUESTS), count("decode-0", computed=TOKENS))),
    ("cache", both(count("lmcache-0", written=5.0), count("prefill-0", computed=11.0 + 255))),
    ("cache", both(count("lmcache-0", written=5.0), having(plan=plan(lmcache=False)))),
    ("cache", with_l2(l2_written=1.0)),
    ("cache", tier("MooncakeStoreConnector", store_keys=8.0, store_failed=7.0)),
    ("cache", tier("OffloadingConnector", offload_bytes=1.0)),
    ("completed", timed(answered=10, cut=10, grace=0.1)),
    ("errors", timed(answered=10, cut=10, grace=0.3)),
    ("other-traffic", page_of_proxy("/tokenize", 1)),
    ("processes", event("ready")),
    ("client-cpu", having(client=CpuUse(used=0.5, wanted=0.89))),
    ("rate", at_rate(4.0, every=0.3)),
    ("tokens", count("prefill-0", computed=11.0 + TOKENS / 2, local_hits=6.0 + TOKENS / 2)),
    ("tokens", count("prefill-0", computed=11.0 + TOKENS * 1.04)),
    ("tokens", both(failed(4, share=0.5), count("prefill-0", computed=11.0 + TOKENS))),
    ("tokens", both(count("proxy", failovers=5.0), count("decode-0", received=5.0 + TOKENS + 2 * INPUT))),
    ("second-attempts", both(failed(0, share=0.1), count("proxy", failovers=4.0))),
    ("cold-cache", count("prefill-0", computed=11.0, local_hits=6.0 + TOKENS / 2)),
    ("cold-cache", both(having(theory=0.7), count("prefill-0", computed=11.0, local_hits=6.0 + 0.84 * TOKENS))),
    ("cold-cache", both(traced, count("prefill-0", computed=11.0, local_hits=6.0 + 0.5 * TOKENS + 64 * REQUESTS))),
    ("errors", both(traced, timed(answered=16, cut=4, grace=30.0))),
    ("rate", both(at_rate(4.0, every=0.48), of_aiperf)),
    ("clock", after(clocks=Clocks(wall=100.4, monotonic=100.0))),
]

UNCOUNTED = after(engines=dict.fromkeys(("prefill-0", "decode-0"), Counts(values={})))
UNKNOWN: list[tuple[str, Change, str]] = [
    ("warm-up", having(warmup=(*COLD, record()), warmup_problem="it ended with 1"), "was not whole: it ended with 1"),
    ("prompt-length", both(traced, having(asked_input=None)), "the trace has text, not lengths"),
    ("prompt-length", both(traced, timed(10, 10, 0.1)), "not every request was answered"),
    ("rate", both(traced, at_rate(99.0, every=1.0)), "turns of a session wait for each other"),
    ("decode-computed", after(engines={}), "decode-0 could not be read"),
    ("decode-computed", count("decode-0", computed=3.0 + REQUESTS), "the last one of each request"),
    ("cache", unread("lmcache-0"), "or could not be read"),
    ("cache", unread("prefill-0"), "the metrics of prefill-0 could not be read (no answer within 3 s)"),
    ("other-traffic", unread("proxy"), "the proxy does not count requests (no answer within 3 s)"),
    (
        "decode-computed",
        both(having(plan=plan(conditional=2000)), unread("proxy"), count("decode-0", computed=3.0 + TOKENS)),
        "what the proxy sent to decode alone is not known (no answer within 3 s)",
    ),
    ("client-cpu", having(client=CpuUse()), "could not be measured"),
    ("tokens", unread("prefill-0"), "what prefill-0 counted is not known"),
    ("tokens", count("prefill-0", preemptions=2.0, computed=11.0 + TOKENS + 2 * INPUT), "of 2 preemptions"),
    (
        "tokens",
        both(traced, timed(16, 4, grace=None), count("decode-0", generated=9.0 + 4 * 1500)),
        "lengths of the 4",
    ),
    (
        "tokens",
        both(conditional(2000, alone=REQUESTS), count("decode-0", computed=3.0 + TOKENS, received=5.0)),
        "prefill",
    ),
    ("cold-cache", UNCOUNTED, "do not count where the tokens of their prompts came from"),
    ("second-attempts", unread("proxy"), "the proxy does not count second attempts (no answer within 3 s)"),
    ("other-traffic", after(proxy=Counts(error="it is vllm-router")), "it is vllm-router"),
    ("cache", after(caches={}), "LMCache reports nothing"),
    ("cache", with_l2(), "LMCache's L2 reports nothing of what it stored"),
]


def test_a_healthy_measurement_is_valid_and_everything_was_checked() -> None:
    verdict = judge(healthy())
    assert (verdict.status, verdict.reasons, verdict.unchecked) == ("VALID", (), ())


@each_row("check, change, text", CASES)
def test_what_makes_a_measurement_invalid(check: str, change: Change, text: str) -> None:
    answer = CHECKS[check](change(healthy()))
    assert isinstance(answer, Invalid)
    assert text in answer.text
    assert judge(change(healthy())).status == "INVALID"


@each_row("check, change", CLOSE)
def test_what_is_close_to_it_and_does_not(check: str, change: Change) -> None:
    assert CHECKS[check](change(healthy())) is None


@each_row("check, change, text", UNKNOWN)
def test_what_could_not_be_checked_is_neither(check: str, change: Change, text: str) -> None:
    answer = CHECKS[check](change(healthy()))
    assert isinstance(answer, Unknown)
    assert text in answer.text
    verdict = judge(change(healthy()))
    assert check in {reason.check for reason in verdict.unchecked}


def test_a_counter_that_appears_on_a_page_that_was_read_began_at_zero() -> None:
    assert count("decode-0", pulls_failed=2.0)(healthy()).engines("prefill", "decode")["pulls_failed"] == 2.0


def test_arrivals_of_vllms_client_are_neither_late_nor_early() -> None:
    """It stretches all of its random gaps, the one before the first request too, to the time of the rate."""
    draw = random.Random(0)
    for _ in range(100):
        gaps = [draw.expovariate(0.5) for _ in range(10)]
        stretch = 10 / 0.5 / sum(gaps)
        records = tuple(record(started=at * stretch) for at in itertools.accumulate(gaps))
        assert CHECKS["rate"](healthy(load=Load(requests=10, rate=0.5), records=records)) is None


def test_every_check_has_a_case() -> None:
    assert {case[0] for case in CASES} == set(CHECKS)


# --- a trace decides what was asked for, a time ends it


def test_only_processes_that_take_times_can_saturate_a_client() -> None:
    records = [record(started=0.0, e2e=10.0)]
    samples = [CpuSample(0.0, 0.0, {1: 0.0, 2: 0.0}, None), CpuSample(10.0, 5.0, {1: 2.0, 2: 9.9}, None)]
    assert cpu_use(samples, records)[0].wanted == pytest.approx(0.99)
    assert cpu_use(samples, records, timing={1})[0].wanted == pytest.approx(0.2)
    assert cpu_use(samples, records, timing={3})[0].wanted is None
