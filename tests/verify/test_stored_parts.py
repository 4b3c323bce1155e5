"""LMCache counts an object for each rank that has KV of its own: one rank of several is not the whole chunk."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from pdserve.lmcache_server import parts_of_a_chunk
from pdserve.plan.model import Plan
from pdserve.verify import cache
from pdserve.verify.report import Outcome
from pdserve.verify.target import Completion, Target
from pdserve.verify.trials import Counters, Trial, Trials, read_counters
from tests.bench.evidence import plan

PROMPT = (1,) * 619
SALTS = ("s0", "s1")


def with_servers(*servers: tuple[int, tuple[str, ...]]) -> Plan:
    """Servers with so many workers and these engines."""
    one = plan().lmcache[0]
    made = tuple(
        one.model_copy(
            update={
                "process": f"lmcache-{number}",
                "http_url": f"http://127.0.0.1:{8080 + number}",
                "expected_workers": workers,
                "engines": engines,
            }
        )
        for number, (workers, engines) in enumerate(servers)
    )
    processes = (
        *plan().processes,
        *(plan().processes[0].model_copy(update={"name": server.process}) for server in made),
    )
    return plan(processes=processes).model_copy(update={"lmcache": made})


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

    async def prove() -> Outcome:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            target = Target(at, client, "key")
            before = await read_counters(target)
            asked = tuple(Trial(PROMPT, salt, Completion((1,), (), (), len(PROMPT), 0)) for salt in SALTS)
            return await cache.prove_stored(target, Trials(asked, before, Counters({}, ())))

    return asyncio.run(prove())


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_STORE_SECONDS", 0.0)


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


@pytest.mark.parametrize(("worlds", "parts"), [((), None), ((1,), 1), ((8, 8, 4), 4)])
def test_parts_are_those_that_the_workers_registered(worlds: Sequence[int], parts: int | None) -> None:
    assert parts_of_a_chunk(status(*worlds)) == parts
