"""NIXL on the real stack: every proof holds, every API is split, and clients that leave leave no blocks behind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.plan.model import cpu_share
from pdserve.system import procfs
from pdserve.system.process import share_of_cpus
from tests.launch.deployment import Deployment
from tests.real.conftest import assert_proven, brought_up
from tests.real.reached import Reached, Stream, body, new_prompt

pytestmark = pytest.mark.real

WORDS = "the quick brown fox jumps over the lazy dog and " * 20
API_BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": WORDS, "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 3},
    "/v1/responses": {"input": WORDS, "max_output_tokens": 3},
    "/v1/messages": {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 3},
}
EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"
ENDED = 'pdserve_patch_effects_total{.*effect="leases-ended".*}'
"""Leases that nixl-abandoned-kv has ended; vLLM counts them as expired."""
DEPARTURES = 6
MEDIUM = 1440
"""Tokens of a prompt that prefill computes in about a second."""


@pytest.fixture(scope="module")
def deployment(home: Path) -> Iterator[Deployment]:
    yield from brought_up("tiny-cpu-nixl", home)


def test_each_engine_keeps_to_its_part_of_the_cpus(tiny: Deployment) -> None:
    """Also its workers, which NIXL binds to one core of the machine, the same for all engines."""
    plan = tiny.run.read_plan()
    for name in (worker.name for worker in plan.proxy.workers):
        part = share_of_cpus(os.sched_getaffinity(0), cpu_share(plan, name))
        root = tiny.id_of(name).pid
        threads = procfs.threads({root, *procfs.descendants(root)})
        assert {cpu for thread in threads for cpu in os.sched_getaffinity(thread)} == part, name


def test_every_proof_is_proven(tiny: Deployment) -> None:
    assert_proven("endpoints", "requests", "transfer", "output", "clean")


async def test_with_each_api_decode_gets_the_place_of_the_kv(reached: Reached) -> None:
    for path, request in API_BODIES.items():
        sources = ("external_kv_transfer", "local_compute")
        before = [await reached.prompt_tokens("decode-0", source) for source in sources]
        salted = {"model": "tiny", "cache_salt": path.replace("/", "-"), "temperature": 0, **request}
        answer = await reached.ask(salted, path=path)
        assert answer.status_code == 200, answer.text
        after = [await reached.prompt_tokens("decode-0", source) for source in sources]
        assert after[0] - before[0] >= 128, path
        assert after[1] - before[1] <= 1, path


async def test_a_streamed_answer_is_the_plain_one_and_its_cached_tokens_are_prefills(reached: Reached) -> None:
    stream = Stream(new_prompt(MEDIUM), 12)
    plain = (await reached.ask(body(stream.prompt, stream.max_tokens))).json()
    await reached.stream(stream, stream_options={"include_usage": True})
    assert stream.tokens == plain["choices"][0]["token_ids"]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in (plain["usage"], stream.chunks[-1]["usage"])]
    assert cached == [0, MEDIUM // 128 * 128]


async def test_clients_that_leave_at_any_moment_leave_no_block_behind(reached: Reached) -> None:
    """At moments spread over a whole request: during prefill, between the legs, on decode. What they held comes free,
    and not because a lease has ended, which prefill counts: so it is soon, as soon as the machine is fast.

    One of them may wait for its lease: the proxy has hung up and listened on for its last moment, and prefill's API
    server was held up for longer. Neither side knows then that an answer was lost.
    """

    async def by_lease() -> float:
        """Leases of prefill that nothing but their end has ended."""
        return await reached.figure("prefill-0", EXPIRED) - await reached.figure("prefill-0", ENDED)

    expired = await by_lease()
    began = time.monotonic()
    await reached.tokens(new_prompt(MEDIUM), 8)
    whole = time.monotonic() - began
    for number in range(DEPARTURES):
        request = body(new_prompt(MEDIUM), 200, stream=number % 2 == 0)
        await reached.leave(request, whole * (number + 1) / DEPARTURES)
        await reached.free(reached.engines)
    assert await by_lease() - expired <= 1
