"""Why it is slow: figures of engines, of the proxy and of the host, from a fault on and not before."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pdserve.doctor.read_run import read_logs, read_run
from pdserve.doctor.records import Diagnosis, LiveFigures
from pdserve.doctor.rules import diagnose
from pdserve.observe.metrics import EngineSnapshot, LmcacheSnapshot, ProxySnapshot, StoreUse
from pdserve.run.directory import RunDir
from pdserve.system.pressure import Pressure
from tests.doctor.kit import diagnosed, only, rules, run_dir
from tests.tables import each_row

RATES = {"prefill-0": 900.0, "prefill-1": 300.0}
HEAD = "(APIServer pid=7) INFO 11-24 11:57:{second:02d} [loggers.py:335] "


def load(
    second: int = 0,
    *,
    prompt: float = 400.0,
    running: int = 4,
    waiting: int = 0,
    deferred: int = 0,
    fetching: int | None = None,
    preemptions: int = 0,
    kv: float = 40.0,
    external: float | None = 60.0,
    who: str = "Engine 000",
) -> str:
    """As LoggingStatLogger.log of vllm 0.32.0 writes it (vllm/v1/metrics/loggers.py)."""
    parts = [
        f"Avg prompt throughput: {prompt} tokens/s",
        "Avg generation throughput: 41.0 tokens/s",
        f"Running: {running} reqs",
        f"Waiting: {waiting} reqs",
        *([f"Deferred: {deferred} reqs"] if deferred else []),
        *([] if fetching is None else [f"KV fetch: 0 waiting to start, {fetching} in progress, 0 completed waiting"]),
        *([f"Preemptions: {preemptions}"] if preemptions else []),
        f"GPU KV cache usage: {kv}%",
        "Prefix cache hit rate: 12.0%",
        *([] if external is None else [f"External prefix cache hit rate: {external}%"]),
    ]
    return HEAD.format(second=second) + f"{who}: " + ", ".join(parts)


def moved(rate: float, *, done: int = 3, failed: int = 0, multi: bool = False) -> str:
    """As KVConnectorLogging.log of vllm 0.32.0 writes it, alone or below a MultiConnector."""
    figures = {"Num successful transfers": done, "Throughput (MB/s)": rate, "Num failed transfers": failed}
    text = f"MooncakeConnector={figures}" if multi else ", ".join(f"{key}={value}" for key, value in figures.items())
    return HEAD.format(second=0) + f"KV Transfer metrics: {text}"


def request(status: int = 200, *, error: str = "", prompt: int | None = 600, queue: float = 0.2) -> str:
    """As the proxy logs it (pd/telemetry/request_log.py)."""
    outcome = {200: "ok", 429: "rejected"}.get(status, "error")
    tokens = "" if prompt is None else f" prompt_tokens={prompt}"
    why = f' error="{error}"' if error else ""
    return f"2026-11-24T11:57:21.732Z {outcome} {status} /v1/completions id=a{tokens} queue_ms={queue}{why}"


# --- engines


@each_row("role", ["prefill", "decode"])
def test_preemptions_are_counted_over_all_lines(tmp_path: Path, role: str) -> None:
    run = run_dir(tmp_path, logs={f"{role}-1": [load(preemptions=2), load(), load(preemptions=5)]})
    diagnosis = only(run)
    assert (diagnosis.rule, diagnosis.times) == ("preemptions", 7)
    assert diagnosis.setting == "engine.args.max-num-seqs=8"
    assert diagnosis.evidence[0].at == "11-24 11:57:00"


RANKS = [f"Engine {rank:03d}" for rank in range(8)]


def test_lines_of_the_ranks_in_one_interval_are_no_time(tmp_path: Path) -> None:
    """Nor are their transfers: the line of a rank's transfers comes after its figures."""
    full = [load(who=rank, kv=97.0, waiting=2) for rank in RANKS]
    silent = [load(who=rank, prompt=9000.0, external=0.0) for rank in RANKS]
    for name, lines in (("decode-0", full), ("prefill-0", silent), ("decode-1", silent)):
        assert rules(run_dir(tmp_path / name, logs={name: lines})) == set()
    slow = {name: [each for rank in RANKS for each in (load(who=rank), moved(rate))] for name, rate in RATES.items()}
    assert "slow-rail" not in rules(run_dir(tmp_path / "rails", logs=slow))


def test_a_full_kv_memory_is_a_cause_when_it_lasts(tmp_path: Path) -> None:
    full = [load(second, waiting=9, kv=99.2) for second in (0, 10, 20)]
    diagnosis = only(run_dir(tmp_path / "long", logs={"decode-0": full}))
    assert (diagnosis.rule, diagnosis.setting) == ("kv-memory-full", "decode.instances=3")
    assert "up to 9 requests waited" in diagnosis.cause
    assert rules(run_dir(tmp_path / "short", logs={"decode-0": full[:2]})) == set()
    idle = [load(second, waiting=0, kv=99.2) for second in (0, 10, 20)]
    assert rules(run_dir(tmp_path / "idle", logs={"decode-0": idle})) == set()


def test_requests_that_wait_for_kv_do_not_wait_for_a_place(tmp_path: Path) -> None:
    """Whether the line has the stage of each fetch, or is of a release without."""
    fetched, older = load(waiting=9, deferred=9, fetching=9, kv=99.2), load(waiting=9, deferred=9, kv=99.2)
    assert rules(run_dir(tmp_path / "a", logs={"decode-0": [fetched] * 3})) == set()
    assert rules(run_dir(tmp_path / "b", logs={"decode-0": [older] * 3})) == set()


def starving(prefill: Sequence[str], decode: Sequence[str]) -> dict[str, Sequence[str]]:
    return {"prefill-0": prefill, "prefill-1": prefill, "decode-0": decode, "decode-1": decode}


def test_a_role_that_waits_while_the_other_is_idle_is_too_small(tmp_path: Path) -> None:
    waiting, idle = [load(waiting=5)] * 3, [load(running=0)] * 3
    diagnosis = only(run_dir(tmp_path / "prefill", logs=starving(waiting, idle)))
    assert (diagnosis.rule, diagnosis.setting) == ("pool-starves", "prefill.instances=3")
    assert diagnosis.processes == ("prefill-0", "prefill-1")
    diagnosis = only(run_dir(tmp_path / "decode", logs=starving(idle, waiting)))
    assert (diagnosis.rule, diagnosis.setting) == ("pool-starves", "decode.instances=3")
    busy = [load(running=3)] * 3
    assert rules(run_dir(tmp_path / "both", logs=starving(waiting, busy))) == set()
    assert rules(run_dir(tmp_path / "one", logs={**starving(waiting, idle), "prefill-1": busy})) == set()


@each_row("multi", [False, True])
def test_transfers_that_the_engine_counts_as_failed(tmp_path: Path, multi: bool) -> None:
    lines = [moved(800, failed=0, multi=multi), moved(0, done=0, failed=4, multi=multi)]
    diagnosis = only(run_dir(tmp_path, logs={"prefill-0": lines}))
    assert (diagnosis.rule, diagnosis.times) == ("transfers-failed", 4)
    assert "3 succeeded" in diagnosis.cause


def test_a_rail_at_less_than_half_of_the_others_is_slow(tmp_path: Path) -> None:
    fast, slow = [moved(4000)] * 3, [moved(900)] * 3
    diagnosis = only(run_dir(tmp_path / "slow", logs={"prefill-0": fast, "prefill-1": slow}))
    assert (diagnosis.rule, diagnosis.processes) == ("slow-rail", ("prefill-1",))
    assert "900 MB/s" in diagnosis.cause
    assert "4000 MB/s" in diagnosis.cause
    assert rules(run_dir(tmp_path / "near", logs={"prefill-0": fast, "prefill-1": [moved(2100)] * 3})) == set()
    assert rules(run_dir(tmp_path / "few", logs={"prefill-0": fast, "prefill-1": slow[:2]})) == set()
    assert rules(run_dir(tmp_path / "roles", logs={"prefill-0": fast, "decode-0": slow})) == set()


# --- the cache


SILENT = [load(second, external=0.0) for second in range(0, 60, 10)]


def test_a_cache_without_a_hit_for_a_minute_is_a_cause_without_a_reason(tmp_path: Path) -> None:
    diagnosis = only(run_dir(tmp_path, logs={"prefill-0": SILENT}))
    assert (diagnosis.rule, diagnosis.processes) == ("cache-never-hits", ("prefill-0",))
    assert "nothing in the run shows why" in diagnosis.cause
    assert "pdserve verify" in diagnosis.todo


@each_row("lines", [
    SILENT[:5], [*SILENT, load(external=0.1)], [load(prompt=0.0, external=0.0)] * 9, [load(external=None)] * 9,
    [load(prompt=30.0, external=0.0)] * 9,
])  # fmt: skip
def test_a_cache_that_was_not_asked_for_a_minute_is_none(tmp_path: Path, lines: list[str]) -> None:
    assert rules(run_dir(tmp_path, logs={"prefill-0": lines})) == set()


def test_a_decode_that_receives_nothing_computes_prompts_itself(tmp_path: Path) -> None:
    assert only(run_dir(tmp_path, logs={"decode-0": SILENT})).rule == "kv-not-moved"


# --- the proxy


def test_refusals_name_the_pool_that_is_full(tmp_path: Path) -> None:
    error = "The decode pool is busy, and its queue is full."
    diagnosis = only(
        run_dir(tmp_path, logs={"proxy": [request(), request(429, error=error), request(429, error=error)]})
    )
    assert (diagnosis.rule, diagnosis.times, diagnosis.setting) == ("pool-busy", 2, "decode.instances=3")
    assert diagnosis.evidence[0].at == "2026-11-24T11:57:21.732Z"


def test_a_refusal_by_a_clients_own_limit_is_no_fault(tmp_path: Path) -> None:
    line = request(429, error="The limit of this API key is 3 requests in flight.")
    assert rules(run_dir(tmp_path, logs={"proxy": [line]})) == set()


def test_json_lines_of_the_proxy_are_read_too(tmp_path: Path) -> None:
    line = '{"request_id":"a","path":"/v1/completions","status":502,"outcome":"error","error":"decode-0 failed"}'
    assert only(run_dir(tmp_path, logs={"proxy": [line, '{"torn', "{}", "[]"]})).rule == "requests-failed"


def test_errors_are_grouped_by_what_the_client_was_told(tmp_path: Path) -> None:
    lines = [request(502, error="decode-0 failed (HTTP 500)")] * 3 + [request(503, error="no prefill is ready")]
    first, second = diagnosed(run_dir(tmp_path, logs={"proxy": lines}))
    assert (first.rule, first.times, second.times) == ("requests-failed", 3, 1)
    assert "decode-0 failed (HTTP 500)" in first.cause


def test_long_waits_for_a_pool(tmp_path: Path) -> None:
    lines = [request(queue=4200.0)] * 6 + [request()] * 5
    diagnosis = only(run_dir(tmp_path / "long", logs={"proxy": lines}))
    assert diagnosis.rule == "proxy-queue"
    assert "4.2 s" in diagnosis.cause
    assert rules(run_dir(tmp_path / "few", logs={"proxy": lines[:6]})) == set()
    assert rules(run_dir(tmp_path / "short", logs={"proxy": [request()] * 20})) == set()


def test_an_engine_that_the_proxy_has_left_out(tmp_path: Path) -> None:
    line = "2026-11-24 10:51:38,594 WARNING decode-1 is not healthy: not used"
    diagnosis = only(run_dir(tmp_path, logs={"proxy": [line]}))
    assert diagnosis.rule == "engine-left-routing"
    assert "decode-1" in diagnosis.cause


# --- live figures


def living(run: RunDir, live: LiveFigures) -> list[Diagnosis]:
    records = read_run(run)
    return diagnose(replace(records, live=live, phase="ready", alive=True), read_logs(run, records))


NEVER = EngineSnapshot("u", external_queries=50_000, external_hits=0)
LIVE = [
    (LiveFigures(engines={"decode-0": EngineSnapshot("u", preemptions=3)}), "preemptions"),
    (LiveFigures(engines={"decode-0": EngineSnapshot("u", failed_transfers=3)}), "transfers-failed"),
    (LiveFigures(engines={"prefill-0": EngineSnapshot("u", store=StoreUse(9, 2, 0))}), "store-failed"),
    (LiveFigures(engines={"prefill-0": EngineSnapshot("u", error="not listening")}), "no-answer"),
    (LiveFigures(engines={"prefill-0": NEVER}), "cache-never-hits"),
    (LiveFigures(proxy=ProxySnapshot("u", rejected={"prefill": 7})), "pool-busy"),
    (LiveFigures(proxy=ProxySnapshot("u", not_ready=("decode-1",))), "engine-left-routing"),
    (LiveFigures(pressure={"proxy": Pressure(0, None, busiest_share=0.97)}), "proxy-saturated"),
    (LiveFigures(pressure={"proxy": Pressure(0, None, busiest_share=0.07, wanted_share=0.94)}), "proxy-saturated"),
    (LiveFigures(pressure={"decode-0": Pressure(3 << 30, None)}), "swapping"),
    (LiveFigures(pressure={"decode-0": Pressure(0, 840.0, periods=1000, throttled_periods=300)}), "cpu-throttled"),
]
HEALTHY = LiveFigures(
    engines={
        "prefill-0": EngineSnapshot("u", preemptions=0, failed_transfers=0, external_queries=50_000, external_hits=9)
    },
    caches={"lmcache-0": LmcacheSnapshot("u", evicted_chunks=99, salts=30, hit_tokens=0)},
    proxy=ProxySnapshot("u", rejected={"prefill": 0}),
    pressure={
        "proxy": Pressure(1 << 20, 0.2, periods=1000, throttled_periods=3, busiest_share=0.4, wanted_share=0.5),
        "decode-0": Pressure(0, 0.0),
    },
)


@each_row("live, rule", LIVE)
def test_what_a_live_process_reports(tmp_path: Path, live: LiveFigures, rule: str) -> None:
    [diagnosis] = living(run_dir(tmp_path), live)
    assert diagnosis.rule == rule
    assert diagnosis.evidence
    assert diagnosis.todo


def test_figures_of_a_deployment_that_is_well_are_no_cause(tmp_path: Path) -> None:
    assert living(run_dir(tmp_path), HEALTHY) == []


SWAPPED = {"event": "swapped", "name": "lmcache-0", "node": "host", "bytes": 700 << 20, "read_back": 0}


def test_swapping_that_was_recorded_and_lasts_is_one_cause_with_both_figures(tmp_path: Path) -> None:
    run = run_dir(tmp_path, events=[SWAPPED, {**SWAPPED, "bytes": 1400 << 20}])
    [diagnosis] = living(run, LiveFigures(pressure={"lmcache-0": Pressure(2 << 30, None)}))
    assert diagnosis.cause.startswith("2.0 GiB of its memory were swapped out to a disk: ")
    assert [line.source for line in diagnosis.evidence] == ["events.jsonl", "/proc of lmcache-0"]


@each_row("name, recipe, setting", [
    ("lmcache-0", {"lmcache": {"l1_size_gb": 4}}, "lmcache.l1_size_gb=3.3"),
    ("lmcache-0", {"lmcache": {"l1_size_gb": 0.5}}, ""),
    ("prefill-0", {"engine": {"env": {"VLLM_CPU_KVCACHE_SPACE": 4}}}, "engine.env.VLLM_CPU_KVCACHE_SPACE=3"),
    (
        "prefill-0",
        {"engine": {"env": {"VLLM_CPU_KVCACHE_SPACE": 4}}, "prefill": {"env": {"VLLM_CPU_KVCACHE_SPACE": "8"}}},
        "prefill.env.VLLM_CPU_KVCACHE_SPACE=7",
    ),
    ("prefill-0", {"engine": {"env": {"VLLM_CPU_KVCACHE_SPACE": 1}}}, ""),
    ("prefill-0", {"engine": {"env": {"VLLM_CPU_KVCACHE_SPACE": "auto"}}}, ""),
    ("prefill-0", {}, ""), ("proxy", {}, ""),
])  # fmt: skip
def test_swapping_asks_for_memory(tmp_path: Path, name: str, recipe: dict[str, Any], setting: str) -> None:
    run = run_dir(tmp_path, events=[{**SWAPPED, "name": name}])
    run.recipe.write_text(json.dumps(recipe))
    assert only(run).setting == setting


@each_row("size", [1 << 20, -5, "much", None, float("nan"), True])
def test_a_little_swap_or_a_torn_figure_is_no_cause(tmp_path: Path, size: object) -> None:
    assert rules(run_dir(tmp_path, events=[{**SWAPPED, "bytes": size}])) == set()
