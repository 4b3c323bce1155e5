"""Clients that leave, prefills that die and parameters that lie, at real engines, past the proxy that would hide them.

What engines without the Mooncake patches make of these: tests/upstream/test_mooncake_transfers.py.
"""

from __future__ import annotations

import asyncio
import signal
import time
from itertools import count
from typing import Any

import pytest

from pdserve.system.process import send
from tests.launch.deployment import Deployment, pdserve, read_json
from tests.real.conftest import effects, member
from tests.real.reached import Reached, body, new_prompt, tokens_of, until
from tests.real.tiny_cpu.conftest import ABORT_SECONDS

pytestmark = pytest.mark.real

CLIENTS = 25
LONG = 3500
"""Tokens of a prompt that prefill is still computing, or has not begun, when its client leaves."""
WAITING = "vllm:num_requests_waiting"
USED = "vllm:kv_cache_usage_perc"
_TRANSFERS = count(1)
MOONCAKE = {"mooncake-requests", "mooncake-sends", "mooncake-pulls", "mooncake-bootstrap"}


async def leave(reached: Reached) -> None:
    """25 clients come, each with a long prompt, and leave when decode has asked for the KV of all of them.

    Their prefill legs come last, so that however slow the machine is, prefill has none of it yet when they leave.
    """
    requests = [(f"left-{next(_TRANSFERS)}", new_prompt(LONG)) for _ in range(CLIENTS)]
    legs = []
    for number, request in enumerate(requests):
        legs.append(asyncio.ensure_future(reached.decode(*request)))
        # Apart, so that decode asks for each in a message of its own.
        await has(reached, "decode-0", WAITING, number + 1, 10)
    legs += [asyncio.ensure_future(reached.prefill(*request)) for request in requests]
    await asyncio.wait(legs, timeout=1)
    for leg in legs:
        leg.cancel()
    await asyncio.wait(legs)


async def has(reached: Reached, name: str, series: str, value: float, seconds: float) -> float:
    """Wait until a figure of an engine has that value; return the seconds that it took."""

    async def has() -> bool:
        return await reached.figure(name, series) == value

    return await until(f"{series} of {name} is {value:g}", has, seconds)


async def next_request(reached: Reached) -> float:
    """Return how long a client that comes now waits for its answer."""
    request = f"next-{next(_TRANSFERS)}", new_prompt(300)
    began = time.monotonic()
    for answer in await asyncio.gather(reached.prefill(*request), reached.decode(*request)):
        assert answer.status_code == 200, answer.text
    return time.monotonic() - began


async def test_the_next_request_is_served_at_once_and_the_blocks_are_free(tiny: Deployment, reached: Reached) -> None:
    status = read_json(pdserve("status", "--json")[1])
    assert all(set(status["processes"][name]["patches"]) >= MOONCAKE for name in reached.engines)
    await next_request(reached)
    await leave(reached)
    await has(reached, "decode-0", USED, 0, ABORT_SECONDS / 4)
    assert await next_request(reached) < ABORT_SECONDS / 2


async def test_a_prefill_that_ends_by_a_stop_token_delivers_its_kv(reached: Reached) -> None:
    prompt = new_prompt(500)
    expected = await reached.tokens(prompt, of="prefill-0")
    before = await reached.prompt_tokens("decode-0", "external_kv_transfer")
    prefilled, answer = await asyncio.gather(
        reached.prefill("stopped", prompt, stop_token_ids=expected[:1]), reached.decode("stopped", prompt)
    )
    assert prefilled.json()["choices"][0]["finish_reason"] == "stop"
    assert tokens_of(answer) == expected
    assert await reached.prompt_tokens("decode-0", "external_kv_transfer") > before


WHOLE = {
    "do_remote_prefill": True,
    "transfer_id": "lie",
    "remote_engine_id": "nobody",
    "remote_bootstrap_addr": "http://127.0.0.1:1",
}
NAMELESS = {name: value for name, value in WHOLE.items() if name != "remote_engine_id"}
LIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("decode-0", {"do_remote_prefill": True}),
    ("decode-0", NAMELESS),
    ("decode-0", WHOLE | {"remote_engine_id": ["nobody"]}),
    ("decode-0", {"do_remote_decode": True, "transfer_id": "lie"}),
    ("prefill-0", WHOLE),
    ("prefill-0", {"do_remote_decode": True}),
)


async def test_false_parameters_cost_no_other_request_anything(tiny: Deployment, reached: Reached) -> None:
    for name, lie in LIES:
        assert await reached.tokens(new_prompt(200), of=name, kv_transfer_params=lie)
    text = {"kv_transfer_params": "do_remote_prefill"}
    answer = await reached.ask(body(new_prompt(200), vllm_xargs=text), of="decode-0")
    assert answer.status_code in (200, 400, 500), "from 0.32 on the API server itself fails on what is no mapping"
    # For a client that leaves, the API server has EngineCore tell prefill, at an address that is not named.
    for _ in range(5):
        await reached.leave(body(new_prompt(LONG), kv_transfer_params=NAMELESS), 0.2, of="decode-0")
    await next_request(reached)
    await has(reached, "decode-0", USED, 0, 2)
    assert tiny.state().phase == "ready"


async def test_decode_notices_that_its_prefill_was_killed(tiny: Deployment, reached: Reached) -> None:
    """Long before another one has been started in its place."""
    core = member(tiny, "prefill-0", "VLLM::EngineCor")
    before = effects("decode-0", "mooncake-pulls").get("peers-lost", 0)
    waiting = asyncio.ensure_future(reached.decode("killed", new_prompt(900)))
    await has(reached, "decode-0", WAITING, 1, 10)
    began = time.monotonic()
    assert send(core, signal.SIGKILL)
    await asyncio.wait({waiting})
    assert time.monotonic() - began < ABORT_SECONDS / 2
    await has(reached, "decode-0", USED, 0, 5)
    # Each open pull counts; one without blocks, of a client that left before it was scheduled, may be open too.
    assert effects("decode-0", "mooncake-pulls")["peers-lost"] > before
