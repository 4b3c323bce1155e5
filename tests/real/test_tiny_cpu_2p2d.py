"""Two prefills and two decodes on the real stack: every instance takes part, the proxy routes by what prefills have,
clients leave, and engines die under load. On the build of the proxy that users install."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pdserve import __version__
from pdserve.system.process import send
from tests.launch.deployment import Deployment, pdserve
from tests.proxy.test_compiled import EXPECTED
from tests.real import kv_faults
from tests.real.conftest import brought_up, member, status_of_all
from tests.real.reached import SECONDS, Reached, Stream, body, new_prompt, until

pytestmark = pytest.mark.real

BLOCK = 128
ABORT_SECONDS = 20
"""How long a prefill keeps KV that nobody fetches: a decode that died may have asked for it."""
FREE_SECONDS = 15.0
"""For what waits for no timeout: far longer than it takes, so that a slow machine has the time, and less than that."""
CLIENTS = 100
STREAMS, STREAM_TOKENS = 4, 1200
"""Few and long: a client that has little of a busy machine must see them begin long before they end."""
LATE, LATE_TOKENS, LATE_PROMPT = 6, 8, 2000


@pytest.fixture(scope="module")
def deployment(home: Path, faults: Path) -> Iterator[Deployment]:
    settings = {
        "prefill.env": kv_faults.installed(faults),
        "timeouts.transfer_abort_seconds": ABORT_SECONDS,
        "proxy.log": "json",
        "proxy.routing": {"prefill": {"kind": "kv_events"}},
        # Twelve engine processes on two cores: one that takes seconds to answer is not sick.
        "proxy.health": {"interval_seconds": 30, "timeout_seconds": 30},
    }
    yield from brought_up("tiny-cpu-2p2d", home, settings)


def test_the_proxy_is_the_build_that_is_under_test(tiny: Deployment) -> None:
    [log] = tiny.run.path.glob("logs/proxy@*.log")
    assert f"pdserve {__version__}, {EXPECTED}" in log.read_text().splitlines()[0]


def test_every_proof_is_proven_and_every_instance_takes_part_with_its_patches(tiny: Deployment) -> None:
    code, output = pdserve("verify", "--json")
    assert code == 0, output
    plan, (_, status) = tiny.run.read_plan(), status_of_all()
    for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
        process = status["processes"][name]
        assert sum(process["engine"]["prompt_tokens"].values()) > 0, name
        reported = process["patch_processes"]
        assert sorted(record["kind"] for record in reported) == ["api-server", "engine-core", "worker"]
        assert {tuple(record["active"]) for record in reported} == {plan.process(name).patches}


def use(deployment: Deployment, policy: str, role: str = "prefill") -> None:
    """Another policy for one pool of the running proxy."""
    path = deployment.run.path / "proxy.json"
    config = json.loads(path.read_text())
    config["routing"][role] = {"kind": policy}
    path.write_text(json.dumps(config))
    deployment.send_signal("proxy", signal.SIGHUP)


async def test_a_prompt_that_comes_again_goes_to_the_prefill_that_has_it(reached: Reached) -> None:
    """By the KV events of the engines. LMCache, which both prefills share, does not count."""
    prompts = [new_prompt(4 * BLOCK + 1) for _ in range(6)]
    for prompt in prompts:
        await reached.tokens(prompt, 2)
    await reached.free(reached.engines)

    async def hits() -> float:
        return sum([await reached.prompt_tokens(name, "local_cache_hit") for name in reached.prefills])

    before = await hits()
    for prompt in random.Random(5).sample(prompts, len(prompts)):
        await reached.tokens(prompt, 2)
    assert await hits() - before == len(prompts) * 4 * BLOCK
    assert 'routing_decisions_total{policy="kv_events",role="prefill"' in await reached.page()


async def test_a_hundred_clients_who_leave_during_prefill_do_not_delay_the_next(reached: Reached) -> None:
    computed = await reached.computed()
    await asyncio.gather(
        *(reached.leave(body(new_prompt(1500), 400, stream=number % 2 == 0), 0.5) for number in range(CLIENTS))
    )
    began = time.monotonic()
    await reached.tokens(new_prompt(300))
    took = time.monotonic() - began
    # Without care for them the next one waits for all of their prompts, or for the abort timeout.
    assert await reached.computed() - computed - 1 < CLIENTS / 2
    assert took < ABORT_SECONDS
    await reached.free(reached.engines)


def test_a_peer_whose_transfers_fail_is_found_by_a_new_engine_and_restarted(tiny: Deployment, faults: Path) -> None:
    lost = faults / kv_faults.LOST
    lost.write_text("prefill-1")
    code, output = pdserve("restart", "decode-0")
    lost.unlink()
    assert code == 0, output
    tiny.wait_for("canary", name="decode-0", ok=True)
    tiny.wait_for("canary", name="decode-0", peer="prefill-1", ok=False)
    assert tiny.wait_for("bad_peer", name="prefill-1")["crossed"] == ["prefill-0"]
    for peer in ("decode-0", "decode-1"):
        tiny.wait_for("canary", name="prefill-1", peer=peer, ok=True)
    tiny.wait_for("phase", after="degraded", phase="ready")


@dataclass(frozen=True)
class Killed:
    """The clients of a killed decode, of the others, and those whose answer had not begun, with their answers."""

    lost: list[Stream]
    kept: list[Stream]
    late: list[tuple[Stream, list[int]]]
    late_lines: list[dict[str, Any]]
    """What the proxy logged of them."""


async def kill(tiny: Deployment, reached: Reached, name: str, hold: Path) -> Killed:
    """Kill the worker of the decode `name` once all streams have begun and the prefills have all late
    requests, of which every other one is no stream. `hold`: a file that holds the prefills, so that none of these has
    begun then, however fast or slow this machine is."""
    sends = [Stream(new_prompt(200), STREAM_TOKENS) for _ in range(STREAMS)]
    late = [Stream(new_prompt(LATE_PROMPT), LATE_TOKENS) for _ in range(LATE)]

    async def sent_to_prefills() -> int:
        workers = await reached.workers()
        return sum(workers[prefill]["served"] for prefill in reached.prefills)

    async with asyncio.TaskGroup() as group:
        for stream in sends:
            group.create_task(reached.stream(stream))
        for stream in sends:
            await stream.began.wait()
        before = await sent_to_prefills()
        with kv_faults.held(hold):
            waiting = [group.create_task(whole(reached, each, stream=at % 2 == 0)) for at, each in enumerate(late)]

            async def sent() -> bool:
                return await sent_to_prefills() >= before + LATE

            await until("they are sent", sent)
            assert not any(stream.began.is_set() for stream in late)
            assert not any(stream.ended for stream in sends), "streams were over before the kill"
            assert send(member(tiny, name, "VLLM::Worker"), signal.SIGKILL)
    lines = await lines_of(tiny, sends + late)
    lost = [stream for stream in sends if lines[stream.request_id]["decode"] == name]
    answers = [(stream, task.result()) for stream, task in zip(late, waiting, strict=True)]
    kept = [stream for stream in sends if stream not in lost]
    return Killed(lost, kept, answers, [lines[stream.request_id] for stream in late])


async def whole(reached: Reached, request: Stream, *, stream: bool) -> list[int]:
    if not stream:
        return await reached.tokens(request.prompt, request.max_tokens, request_id=request.request_id)
    await reached.stream(request)
    assert request.whole, request.events[-3:]
    return request.tokens


async def lines_of(tiny: Deployment, streams: list[Stream]) -> dict[str, dict[str, Any]]:
    """The proxy's lines about these requests, by id; they come soon after the end of the last."""
    wanted = {stream.request_id for stream in streams}
    log = tiny.run.path / tiny.run.read_plan().process("proxy").log
    found: dict[str, dict[str, Any]] = {}

    async def all_found() -> bool:
        lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"request_id"')]
        found.update({line["request_id"]: line for line in lines if line["request_id"] in wanted})
        return found.keys() == wanted

    await until("the proxy has logged them", all_found)
    return found


async def assert_reported(reached: Reached, killed: Killed) -> None:
    """No answer is wrong, none is silently short, and whatever could be tried again was."""
    assert killed.lost
    assert killed.kept
    for stream in killed.lost:
        error = stream.chunks[-1]["error"]
        assert error.keys() >= {"message", "type", "param", "code"}, error
        assert len(stream.tokens) < STREAM_TOKENS
    for stream in killed.kept:
        assert stream.whole, stream.events[-2:]
    assert any(line["attempts"] > 1 for line in killed.late_lines), "none of them was on that decode"
    answers = [(stream.prompt, stream.tokens) for stream in (*killed.lost, *killed.kept)]
    answers += [(stream.prompt, tokens) for stream, tokens in killed.late]
    right = [reached.tokens(prompt, len(tokens), of="prefill-0") for prompt, tokens in answers]
    assert [tokens for _, tokens in answers] == await asyncio.gather(*right)
    assert {len(stream.tokens) for stream in killed.kept} == {STREAM_TOKENS}


async def test_a_decode_killed_while_it_streams_ends_its_streams_by_an_error_and_costs_no_other_request(
    tiny: Deployment, reached: Reached, faults: Path
) -> None:
    """Its worker, of whose end vLLM may speak; for broken connections: tests/proxy/test_upstream.py. It comes back."""
    name = "decode-0"
    use(tiny, "round_robin", "decode")
    use(tiny, "round_robin")
    before = tiny.id_of(name)
    killed = await kill(tiny, reached, name, faults / kv_faults.HOLD_STEPS)
    await asyncio.gather(*(reached.tokens(new_prompt(300), 4) for _ in range(4)))
    await reached.free(reached.prefills, ABORT_SECONDS + SECONDS)
    await assert_reported(reached, killed)

    async def back() -> bool:
        another = tiny.state().processes[name].id not in (None, before)
        return another and (await reached.workers())[name]["state"] == "ready"

    await until("the proxy uses another one in its place", back)
    more = [Stream(new_prompt(300), 4) for _ in range(4)]
    await asyncio.gather(*map(reached.stream, more))
    lines = (await lines_of(tiny, more)).values()
    assert {line["prefill"] for line in lines} == set(reached.prefills)
    assert name in {line["decode"] for line in lines}
    assert {line["attempts"] for line in lines} == {1}, "each by the first attempt"
    await reached.free(reached.engines, FREE_SECONDS)


async def test_a_prefill_killed_under_load_costs_no_request(tiny: Deployment, reached: Reached) -> None:
    """Nothing had been sent to any of these clients when their prefill died. vLLM itself exits with code 0 seconds
    after its worker, as if nothing had happened. Last in the module: nobody waits for the next one."""
    worker = member(tiny, "prefill-1", "VLLM::Worker")
    before = (await reached.workers())["prefill-1"]["served"]

    async def client() -> list[int]:
        return [len(await reached.tokens(new_prompt(400), 8)) for _ in range(3)]

    async def reached_it() -> bool:
        return bool((await reached.workers())["prefill-1"]["served"] > before)

    running = [asyncio.ensure_future(client()) for _ in range(6)]
    await until("one of them is sent there", reached_it)
    assert send(worker, signal.SIGKILL)
    assert await asyncio.gather(*running) == [[8] * 3] * 6
    assert tiny.wait_for("died", name="prefill-1")["member"].startswith("VLLM::")
