"""What counters show: one rank of several is not the whole chunk, and a reading that failed is not zero."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from pdserve.observe.metrics import EngineSnapshot, LmcacheSnapshot
from pdserve.plan.model import Plan
from pdserve.verify import cache
from pdserve.verify.load import proofs
from pdserve.verify.load.traffic import SentWindow, Traffic
from pdserve.verify.report import Outcome
from pdserve.verify.target import Completion, Target
from pdserve.verify.trials import Counters, Trial, Trials, read_counters, received_since, tokens_since
from tests.bench.evidence import lmcache_server, plan, process
from tests.verify.deployment import asked

PROMPT = tuple(range(619))
SALTS = ("s0", "s1")


def with_servers(*servers: tuple[int, tuple[str, ...]]) -> Plan:
    """Servers with so many workers and these engines."""
    made = tuple(
        lmcache_server(
            process=f"lmcache-{number}",
            http_url=f"http://127.0.0.1:{8080 + number}",
            expected_workers=workers,
            engines=engines,
        )
        for number, (workers, engines) in enumerate(servers)
    )
    processes = (*plan().processes, *(process(server.process, "lmcache") for server in made))
    return plan(processes=processes, lmcache=made)


def status(*worlds: int) -> dict[str, Any]:
    """Of a server with a worker for each number: into how many parts its engine cuts a chunk."""
    l1 = {"total_object_count": 0, "memory_used_bytes": 1, "memory_total_bytes": 2}
    meta = {str(number): {"world_size": world} for number, world in enumerate(worlds)}
    return {"is_healthy": True, "storage_manager": {"l1_manager": l1}, "non_cuda_context_meta": meta}


def stored(at: Plan, written: int, *statuses: dict[str, Any] | None) -> Outcome:
    """`written`: objects for each salt, of each server. None: its /status answers 500."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            lines = [f'lmcache_mp_l1_write_chunks_total{{cache_salt="{salt}"}} {written}\n' for salt in SALTS]
            return httpx.Response(200, text="".join(lines))
        known = statuses[(request.url.port or 0) - 8080]
        return httpx.Response(500) if known is None else httpx.Response(200, json=known)

    async def prove(target: Target) -> Outcome:
        before = await read_counters(target)
        trials = tuple(Trial(PROMPT, salt, Completion((1,), (), (), len(PROMPT), 0)) for salt in SALTS)
        return await cache.prove_stored(target, Trials(trials, before, Counters({}, ())))

    return asked(answer, prove, at)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_STORE_SECONDS", 0.0)
    monkeypatch.setattr(cache, "_READ_SECONDS", 0.0)


@pytest.mark.parametrize(("written", "proof"), [(2, "failed"), (15, "failed"), (16, "proven"), (32, "proven")])
def test_every_rank_stores_its_part(written: int, proof: str) -> None:
    """Two chunks of each of two prompts, on eight ranks."""
    outcome = stored(with_servers((8, ("prefill-0",))), written, status(*[8] * 8))
    assert (outcome.status, outcome.numbers["chunks expected"]) == (proof, 32)
    assert outcome.numbers["parts of a chunk"] == 8


def test_ranks_that_all_have_the_same_kv_store_it_once() -> None:
    """MLA: LMCache has its engines as one part; data-parallel ranks have prompts of their own."""
    outcome = stored(with_servers((8, ("prefill-0",))), 2, status(*[1] * 8))
    assert (outcome.status, outcome.numbers["chunks expected"]) == ("proven", 4)


@pytest.mark.parametrize(("written", "proof"), [(2, "failed"), (4, "proven")])
def test_the_servers_of_an_engine_have_its_parts_together(written: int, proof: str) -> None:
    """A server a rank, of an engine with four ranks, two of them at each server."""
    at = with_servers((2, ("prefill-0",)), (2, ("prefill-0",)))
    assert stored(at, written, status(2, 2), status(2, 2)).status == proof


def test_a_server_that_does_not_say_leaves_it_open() -> None:
    for known in (None, status()):
        outcome = stored(with_servers((2, ("prefill-0",))), 2, known)
        assert outcome.status == "not-proven"
        assert "how many parts a chunk has" in outcome.reason


def test_an_engine_with_one_rank_has_one_part_whoever_says_so() -> None:
    assert stored(with_servers((1, ("prefill-0",))), 2, None).status == "proven"


# --- a first reading of counters that failed is not zero

COMPLETION = Completion(tokens=(7,), logprobs=(), prompt_logprobs=(), prompt_tokens=len(PROMPT), cached_tokens=None)
UNREAD = EngineSnapshot("http://e", error="no answer within 3 s")


def counted(computed: int, received: int) -> EngineSnapshot:
    tokens = {"local_compute": computed, "local_cache_hit": 0, "external_kv_transfer": received}
    return EngineSnapshot("http://e", prompt_tokens=tokens)


def test_a_counter_that_is_missing_began_at_zero_where_its_page_was_read() -> None:
    assert received_since(EngineSnapshot("http://e"), counted(1, 9)) == 9
    assert received_since(UNREAD, counted(1, 9)) is None
    assert tokens_since(UNREAD, counted(1, 9), "local_compute") is None
    assert tokens_since(EngineSnapshot("http://e"), counted(1, 9), "local_compute") == 1


def server(objects: int | None) -> LmcacheSnapshot:
    return LmcacheSnapshot("http://s", error=None if objects is not None else "no answer", objects=objects)


def test_objects_of_all_servers_are_known_when_each_was_read() -> None:
    assert Counters({}, (server(3), server(4))).objects == 7
    assert Counters({}, (server(3), server(None))).objects is None


def test_chunks_stored_since_an_unread_status_are_not_proven() -> None:
    """Without counters by salt the server's objects count, and it has those of others."""
    l1 = {"total_object_count": 900, "memory_used_bytes": 1, "memory_total_bytes": 2}
    status = {"is_healthy": True, "storage_manager": {"l1_manager": l1}}

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=status) if request.url.path == "/status" else httpx.Response(200, text="")

    async def prove(target: Target) -> Outcome:
        before = Counters((await read_counters(target)).engines, (server(None),))
        return await cache.prove_stored(target, Trials((Trial(PROMPT, "salt", COMPLETION),), before, before))

    outcome = asked(answer, prove)
    assert (outcome.status, outcome.numbers["chunks stored"]) == ("not-proven", None)
    assert outcome.numbers["objects"] == "? -> 900"


def test_a_window_of_a_load_whose_end_was_not_read_is_not_a_window_in_which_decode_computed_nothing() -> None:
    page = 'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"} 10\n'

    windows = tuple(
        SentWindow(number, (), Counters({"decode-0": reading}, ()), 1.0, None)
        for number, reading in enumerate((counted(0, 0), UNREAD))
    )
    traffic = Traffic(windows, 0, None, False)
    outcome = asked(
        lambda request: httpx.Response(200, text=page), lambda target: proofs.prove_transfer(target, traffic)
    )
    assert outcome.status == "not-proven"
    assert "requests 0-" in outcome.reason
