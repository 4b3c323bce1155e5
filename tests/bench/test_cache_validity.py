"""A cache tier that is on must have stored what was computed, on every engine: its own pages say so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pdserve.bench.snapshot import LMCACHE, Counts, counts
from pdserve.bench.validity import CHECKS, Answer, Evidence, Invalid, Unknown
from pdserve.observe.metrics import samples_of
from pdserve.pd.config.proxy import WorkerConfig
from pdserve.plan.model import Plan
from tests.bench.evidence import TOKENS, healthy, plan
from tests.tables import each_row

GAUGES = "lmcache_mp_l1_memory_usage_bytes 0\n"
"""Of a server of LMCache 0.5.6 that has counted nothing yet."""
LOOKUPS = 'lmcache_mp_lookup_requested_tokens_total{cache_salt="s"} 20000\n'
WRITTEN = 'lmcache_mp_l1_write_chunks_total{cache_salt="s"} %s\n'


def check(evidence: Evidence) -> Answer:
    return CHECKS["cache"](evidence)


def lmcache_pages(before: str, after: str) -> Evidence:
    """LMCache's own pages, before the first request and after the last answer."""
    evidence = healthy()
    readings = [
        reading.model_copy(update={"caches": {"lmcache-0": counts(samples_of(page), LMCACHE)}})
        for reading, page in ((evidence.before, before), (evidence.after, after))
    ]
    return replace(evidence, before=readings[0], after=readings[1])


@each_row("page", [GAUGES, GAUGES + LOOKUPS])
def test_a_server_that_never_stored_anything_has_no_counter_and_stored_nothing(page: str) -> None:
    answer = check(lmcache_pages(GAUGES, page))
    assert isinstance(answer, Invalid)
    assert "LMCache is on and stored nothing, while 20000 prompt tokens were computed" in answer.text


@each_row("page", ["", "python_info 1\n", GAUGES + WRITTEN % "NaN"])
def test_a_page_that_does_not_say_what_was_stored_is_no_proof(page: str) -> None:
    assert isinstance(check(lmcache_pages(page, page)), Unknown)


def two_prefills(engines: tuple[tuple[str, ...], ...]) -> Plan:
    """With an LMCache server for each group of engines."""
    one = plan()
    prefill = one.proxy.workers[0]
    second = WorkerConfig.model_validate(
        {**prefill.model_dump(), "name": "prefill-1", "url": "http://127.0.0.1:77", "bootstrap_url": "http://[::1]:78"}
    )
    return one.model_copy(
        update={
            "proxy": one.proxy.model_copy(update={"workers": (*one.proxy.workers, second)}),
            "processes": (*one.processes, one.processes[0].model_copy(update={"name": "prefill-1"})),
            "lmcache": tuple(
                one.lmcache[0].model_copy(update={"process": f"lmcache-{number}", "engines": names})
                for number, names in enumerate(engines)
            ),
        }
    )


def measured(of: Plan, *, computed: Mapping[str, float], written: Mapping[str, float]) -> Evidence:
    evidence = healthy(plan=of)

    def reading(share: float) -> Mapping[str, Mapping[str, Counts]]:
        return {
            "engines": {name: Counts(values={"computed": tokens * share}) for name, tokens in computed.items()},
            "caches": {name: Counts(values={"written": chunks * share}) for name, chunks in written.items()},
        }

    return replace(
        evidence,
        before=evidence.before.model_copy(update=dict(reading(0))),
        after=evidence.after.model_copy(update=dict(reading(1))),
    )


EACH = (("prefill-0",), ("prefill-1",))
HALF = TOKENS / 2


def test_the_server_of_one_engine_does_not_speak_for_that_of_another() -> None:
    tokens = {"prefill-0": HALF, "prefill-1": HALF}
    answer = check(measured(two_prefills(EACH), computed=tokens, written={"lmcache-0": 60, "lmcache-1": 0}))
    assert isinstance(answer, Invalid)
    assert "LMCache is on and stored nothing of prefill-1, while 10000 prompt tokens were computed there" in answer.text


def test_an_engine_that_computed_no_whole_chunk_has_nothing_to_store() -> None:
    tokens = {"prefill-0": TOKENS - 255.0, "prefill-1": 255.0}
    assert check(measured(two_prefills(EACH), computed=tokens, written={"lmcache-0": 60, "lmcache-1": 0})) is None


@each_row("engines", [(("prefill-0", "prefill-1"),), (("prefill-0", "prefill-1"), ("prefill-0", "prefill-1"))])
def test_engines_that_share_servers_are_judged_by_all_of_them(engines: tuple[tuple[str, ...], ...]) -> None:
    """With a server for each TP rank, and the KV of a model whose ranks all have the same, one stores for all."""
    tokens = {"prefill-0": HALF, "prefill-1": HALF}
    assert check(measured(two_prefills(engines), computed=tokens, written={"lmcache-0": 60, "lmcache-1": 0})) is None
