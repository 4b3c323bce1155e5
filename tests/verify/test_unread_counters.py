"""A first reading of counters that failed is not zero: what was counted since then is not known."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from pdserve.observe.metrics import EngineSnapshot, LmcacheSnapshot
from pdserve.verify import cache
from pdserve.verify.load import proofs
from pdserve.verify.load.traffic import SentWindow, Traffic
from pdserve.verify.report import Outcome
from pdserve.verify.target import Completion, Target
from pdserve.verify.trials import Counters, Trial, Trials, read_counters, received_since, tokens_since
from tests.bench.evidence import plan, with_connector

PROMPT = tuple(range(619))
LIFETIME = 50_000
COMPLETION = Completion(tokens=(7,), logprobs=(), prompt_logprobs=(), prompt_tokens=len(PROMPT), cached_tokens=None)
UNREAD = EngineSnapshot("http://e", error="no answer within 3 s")


def counted(computed: int, received: int) -> EngineSnapshot:
    tokens = {"local_compute": computed, "local_cache_hit": 0, "external_kv_transfer": received}
    return EngineSnapshot("http://e", prompt_tokens=tokens)


class Recomputing:
    """An engine that computes every prompt, after a life in which it received KV. `unread`: its /metrics does not
    answer the first time after its cache was cleared."""

    def __init__(self, *, unread: bool) -> None:
        self._unread, self._cleared, self._computed = unread, False, 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            if self._unread and self._cleared:
                self._cleared = False
                raise httpx.ReadTimeout("slow", request=request)
            return httpx.Response(200, text=self._page())
        if request.url.path == "/reset_prefix_cache":
            self._cleared = True
            return httpx.Response(200, json={"success": True})
        body = json.loads(request.content)
        self._computed += len(body["prompt"])
        choice = {"token_ids": [7] * body["max_tokens"]}
        return httpx.Response(200, json={"choices": [choice], "usage": {"prompt_tokens": len(body["prompt"])}})

    def _page(self) -> str:
        return (
            f'vllm:prompt_tokens_by_source_total{{source="local_compute"}} {self._computed}\n'
            f'vllm:prompt_tokens_by_source_total{{source="external_kv_transfer"}} {LIFETIME}\n'
            'vllm:cache_config_info{block_size="16"} 1\n'
        )


def offload_reload(engine: Recomputing) -> Outcome:
    async def prove() -> Outcome:
        async with httpx.AsyncClient(transport=httpx.MockTransport(engine)) as client:
            target = Target(with_connector("OffloadingConnector"), client, "key")
            tokens = target.plan.verify.output_tokens
            answer = await target.complete(target.proxy_url, PROMPT, salt="salt", max_tokens=tokens)
            before = await read_counters(target)
            return await cache.prove_offload_reload(target, Trials((Trial(PROMPT, "salt", answer),), before, before))

    return asyncio.run(prove())


class TestAReloadThatDidNotHappen:
    def test_fails_when_all_was_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cache, "_READ_SECONDS", 0.0)
        assert offload_reload(Recomputing(unread=False)).status == "failed"

    def test_is_not_proven_by_what_an_engine_received_in_its_whole_life(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cache, "_READ_SECONDS", 0.0)
        outcome = offload_reload(Recomputing(unread=True))
        assert outcome.status == "not-proven"
        assert "could not be read" in outcome.reason


def test_tokens_since_an_unread_page_are_not_known() -> None:
    assert received_since(UNREAD, counted(1, LIFETIME)) is None
    assert tokens_since(UNREAD, counted(1, LIFETIME), "local_compute") is None


def test_a_counter_that_is_missing_from_a_page_that_was_read_began_at_zero() -> None:
    assert received_since(EngineSnapshot("http://e"), counted(1, 9)) == 9
    assert tokens_since(EngineSnapshot("http://e"), counted(1, 9), "local_compute") == 1


def server(objects: int | None) -> LmcacheSnapshot:
    return LmcacheSnapshot("http://s", error=None if objects is not None else "no answer", objects=objects)


def test_objects_of_all_servers_are_known_when_each_was_read() -> None:
    assert Counters({}, (server(3), server(4))).objects == 7
    assert Counters({}, (server(3), server(None))).objects is None


def test_chunks_stored_since_an_unread_status_are_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without counters by salt the server's objects count, and it has those of others."""
    monkeypatch.setattr(cache, "_STORE_SECONDS", 0.0)
    l1 = {"total_object_count": 900, "memory_used_bytes": 1, "memory_total_bytes": 2}
    status = {"is_healthy": True, "storage_manager": {"l1_manager": l1}}

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=status) if request.url.path == "/status" else httpx.Response(200, text="")

    async def prove() -> Outcome:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            target = Target(plan(), client, "key")
            before = Counters((await read_counters(target)).engines, (server(None),))
            return await cache.prove_stored(target, Trials((Trial(PROMPT, "salt", COMPLETION),), before, before))

    outcome = asyncio.run(prove())
    assert (outcome.status, outcome.numbers["chunks stored"]) == ("not-proven", None)
    assert outcome.numbers["objects"] == "? -> 900"


def test_a_window_of_a_load_whose_end_was_not_read_is_not_a_window_in_which_decode_computed_nothing() -> None:
    page = 'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"} 10\n'

    async def prove() -> Outcome:
        transport = httpx.MockTransport(lambda request: httpx.Response(200, text=page))
        async with httpx.AsyncClient(transport=transport) as client:
            readings = (counted(0, 0), UNREAD)
            windows = tuple(
                SentWindow(number, (), Counters({"decode-0": reading}, ()), 1.0, None)
                for number, reading in enumerate(readings)
            )
            return await proofs.prove_transfer(Target(plan(), client, "key"), Traffic(windows, 0, None, False))

    outcome = asyncio.run(prove())
    assert outcome.status == "not-proven"
    assert "requests 0-" in outcome.reason
