"""Snapshots of engines and LMCache servers, read from answers that real ones gave after one run of `verify`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from pdserve.observe.metrics import (
    EngineSnapshot,
    LmcacheSnapshot,
    ProxySnapshot,
    SaltUse,
    StoreUse,
    engine_snapshot,
    lmcache_salt_use,
    lmcache_snapshot,
    proxy_snapshot,
    view_client,
)
from tests.tables import each_row

RECORDED = Path(__file__).parent / "fixtures" / "http"
URL = "http://engine:8100"
Snapshot = TypeVar("Snapshot")


def recorded(name: str) -> str:
    return (RECORDED / name).read_text()


def ask(
    look: Callable[[str, httpx.AsyncClient], Coroutine[Any, Any, Snapshot]], answers: dict[str, str | int | Exception]
) -> Snapshot:
    """Looks at a server that answers each path with a text, a status or a failure of the network."""

    def answer(request: httpx.Request) -> httpx.Response:
        response = answers.get(request.url.path, 404)
        if isinstance(response, Exception):
            raise response
        return httpx.Response(response) if isinstance(response, int) else httpx.Response(200, text=response)

    async def go() -> Snapshot:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            return await look(URL, client)

    return asyncio.run(go())


def engine(metrics: str | int | Exception) -> EngineSnapshot:
    return ask(engine_snapshot, {"/metrics": metrics})


def lmcache(status: str | int | Exception, metrics: str | int | Exception = 404) -> LmcacheSnapshot:
    return ask(lmcache_snapshot, {"/status": status, "/metrics": metrics})


def test_a_prefill_that_computed_prompts_and_reloaded_one() -> None:
    prefill = engine(recorded("vllm-0.32.0-prefill.metrics"))
    assert prefill == EngineSnapshot(
        url=URL,
        running=0,
        waiting=0,
        kv_cache_usage=0.0,
        prefix_queries=6195,
        prefix_hits=0,
        external_queries=6195,
        external_hits=512,
        prompt_tokens={"local_compute": 5683, "local_cache_hit": 0, "external_kv_transfer": 512},
        preemptions=0,
    )
    assert prefill.reachable
    assert prefill.unfinished == 0
    assert prefill.received_tokens == 512
    assert prefill.prefix_hit_rate == 0
    assert prefill.external_hit_rate == pytest.approx(512 / 6195)


def test_data_parallel_ranks_are_summed_and_the_fullest_counts() -> None:
    first = 'vllm:num_requests_running{engine="0"} 2.0\nvllm:kv_cache_usage_perc{engine="0"} 0.25\n'
    two = 'vllm:num_requests_running{engine="1"} 3.0\nvllm:kv_cache_usage_perc{engine="1"} 0.75\n'
    both = engine(first + two)
    assert (both.running, both.kv_cache_usage) == (5, 0.75)
    failed = "".join(
        f'vllm:{name}_total{{engine="0"}} {count}\n'
        for name, count in (
            ("nixl_num_failed_transfers", 2),
            ("mooncake_num_failed_transfers", 3),
            ("mooncake_num_failed_recvs", 4),
            ("num_preemptions", 5),
        )
    )
    assert (engine(failed).failed_transfers, engine(failed).preemptions) == (9, 5)


def test_what_an_engine_does_not_report_is_unknown_not_zero() -> None:
    silent = engine("# statistics are off\npython_info 1.0\n")
    assert silent == EngineSnapshot(url=URL)
    assert silent.reachable
    assert (silent.unfinished, silent.received_tokens, silent.prefix_hit_rate) == (None, None, None)


@each_row("number", ["NaN", "+Inf"])
def test_what_is_no_number_is_unknown(number: str) -> None:
    page = (
        f"vllm:num_requests_running {number}\nvllm:num_requests_waiting 2\nvllm:kv_cache_usage_perc {number}\n"
        f'vllm:prompt_tokens_by_source_total{{source="local_compute"}} {number}\n'
        f'vllm:mooncake_store_operation_keys_total{{operation="save_put"}} {number}\n'
    )
    seen = engine(page)
    assert (seen.running, seen.waiting, seen.kv_cache_usage, seen.prompt_tokens) == (None, 2, None, None)
    assert seen.store == StoreUse(stored=0, failed=0, loaded=0)
    refused = f'pdserve_proxy_admission_rejections_total{{pool="decode",reason="full"}} {number}\n'
    assert ask(proxy_snapshot, {"/metrics": refused}).rejected == {}


FAILURES = [
    (httpx.ConnectError("refused"), "not listening"),
    (httpx.ReadTimeout("late"), "no answer within 3 s"),
    (httpx.ReadError(""), "no answer: ReadError"),
    (503, "HTTP 503"),
]


@each_row("failure, message", [
    *FAILURES,
    ("vllm:{{{", "unreadable answer"),
    ('a_total{x="y",\t="w"} 1.0\n', "unreadable answer: no metrics"),
])  # fmt: skip
def test_an_unreadable_engine_is_reported_with_its_error(failure: str | int | Exception, message: str) -> None:
    dead = engine(failure)
    assert not dead.reachable
    assert message in str(dead.error)
    assert dead == EngineSnapshot(url=URL, error=dead.error)


def test_a_cache_after_prompts_were_stored_and_one_was_reloaded() -> None:
    cache = lmcache(recorded("lmcache-0.5.6-status.json"), recorded("lmcache-0.5.6.metrics"))
    assert cache == LmcacheSnapshot(
        url=URL,
        healthy=True,
        workers=1,
        objects=18,
        bytes_used=9437184,
        bytes_total=1 << 30,
        requested_tokens=5120,
        hit_tokens=512,
        salts=0,
        parts=1,
        read_locked=0,
    )
    assert cache.hit_rate == pytest.approx(0.1)
    lmcache_driven = recorded("lmcache-0.5.6-status.json").replace(
        '"registered_gpu_ids": []', '"registered_gpu_ids": [1, 2]'
    )
    assert lmcache(lmcache_driven).workers == 3, "in either transfer mode"


@each_row("failure, message", [
    *FAILURES,
    ("<html>", "unreadable answer"),
    ("{}", "unreadable answer: 'storage_manager'"),
    ("[]", "unreadable answer"),
    (recorded("lmcache-0.5.6-status.json").replace("9437184", "1e999"), "unreadable answer"),
])  # fmt: skip
def test_an_unreadable_cache_is_reported_with_its_error(failure: str | int | Exception, message: str) -> None:
    dead = lmcache(failure)
    assert not dead.reachable
    assert message in str(dead.error)
    assert dead == LmcacheSnapshot(url=URL, error=dead.error)


def salt_use(metrics: str | int | Exception, *salts: str) -> SaltUse | None:
    return ask(lambda url, client: lmcache_salt_use(url, salts, client), {"/metrics": metrics})


def test_what_a_cache_did_for_one_salt() -> None:
    metrics = recorded("lmcache-0.5.6.metrics")
    assert salt_use(metrics, "pdserve-verify-run-trial-0") == SaltUse(chunks_written=2, chunks_read=2)
    assert salt_use(metrics, "pdserve-verify-run-trial-1") == SaltUse(chunks_written=2, chunks_read=0)
    both = salt_use(metrics, "pdserve-verify-run-trial-0", "pdserve-verify-run-trial-1")
    assert both == SaltUse(chunks_written=4, chunks_read=2)
    assert salt_use(metrics, "unheard-of") == SaltUse(chunks_written=0, chunks_read=0)


@each_row("metrics", ["lmcache_mp_l1_usage_ratio 0.5\n", 404, httpx.ConnectError("refused")])
def test_without_salts_nothing_is_known_of_one(metrics: str | int | Exception) -> None:
    assert salt_use(metrics, "any") is None


def test_a_proxy_reports_refusals_and_workers_that_get_nothing() -> None:
    page = (
        'pdserve_proxy_admission_rejections_total{pool="decode",reason="full"} 3.0\n'
        'pdserve_proxy_admission_rejections_total{pool="decode",reason="late"} 2.0\n'
        'pdserve_proxy_worker_ready{role="decode",worker="decode-0"} 1.0\n'
        'pdserve_proxy_worker_ready{role="decode",worker="decode-1"} 0.0\n'
    )
    seen = ask(proxy_snapshot, {"/metrics": page})
    assert seen == ProxySnapshot(URL, None, {"decode": 5}, ("decode-1",))


def test_the_environments_proxy_is_never_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    client = view_client()
    assert not client.trust_env
    asyncio.run(client.aclose())
