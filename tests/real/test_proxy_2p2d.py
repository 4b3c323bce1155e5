"""The proxy over two real prefills and two real decodes: routing, departures, and engines that die under load."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from pdserve import __version__
from pdserve.system.process import send
from tests.launch.deployment import REPOSITORY, Deployment, wait_until
from tests.proxy.test_compiled import EXPECTED
from tests.real import kv_faults
from tests.real.conftest import brought_up, member, status_of_all
from tests.real.lost_decode import (
    LATE,
    LATE_PROMPT,
    LATE_TOKENS,
    STREAM_TOKENS,
    STREAMS,
    Reached,
    assert_reported,
    kill,
    reached,
)

pytestmark = pytest.mark.real

NAME = "proxy-2p2d"
BLOCK = 128
SESSIONS, TURNS = 4, 3
ABORT_SECONDS = 20
"""How long a prefill keeps KV that nobody fetches: a decode that died may have asked for it."""
FREE_SECONDS = 15.0
"""For what waits for no timeout: far longer than it takes, so that a slow machine has the time, and less than that."""
CLIENTS = 100
COMPUTED = r'request_success_total\{.*finished_reason="length".*\}'
"""Requests that were not aborted."""
WAIT_SECONDS = 120.0
"""For what must happen some time: a limit, not a measurement."""


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a test tells the prefills which fault to have."""
    return tmp_path_factory.mktemp("faults") / "orders"


@pytest.fixture(scope="module")
def tiny(home: Path, faults: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Without LMCache, which would hide where a prompt went: what a prefill has not computed itself is a miss."""
    document = yaml.safe_load((REPOSITORY / "recipes" / "tiny-cpu-2p2d.yaml").read_text())
    restart = {"policy": "on-failure", "backoff_seconds": 0.1}
    document["extends"] = str(REPOSITORY / "recipes" / "tiny-cpu.yaml")
    document["prefill"] |= {
        "connector": {"kind": "mooncake", "protocol": "tcp"},
        "restart": restart,
        "env": kv_faults.installed(faults),
    }
    document["decode"] |= {"restart": restart}
    document["timeouts"]["transfer_abort_seconds"] = ABORT_SECONDS
    # Eight engine processes on two cores: one that takes seconds to answer is not sick.
    health = {"interval_seconds": 30, "timeout_seconds": 30}
    document["proxy"] = {"log": "json", "routing": {"prefill": {"kind": "kv_events"}}, "health": health}
    recipe = tmp_path_factory.mktemp("recipe") / f"{NAME}.yaml"
    recipe.write_text(yaml.safe_dump(document | {"name": NAME, "lmcache": None}))
    yield from brought_up(NAME, home, recipe)


@pytest.fixture(autouse=True)
def _all_serve(tiny: Deployment) -> None:
    """Also what the test before has killed."""
    wait_until("all engines serve", lambda: tiny.state().phase == "ready", WAIT_SECONDS)


def test_the_proxy_is_the_build_that_is_under_test(tiny: Deployment) -> None:
    [log] = tiny.run.path.glob("logs/proxy@*.log")
    assert f"pdserve {__version__}, {EXPECTED}" in log.read_text().splitlines()[0]


class Clients:
    """Clients of the proxy, and the engines' own figures."""

    def __init__(self, deployment: Deployment, client: httpx.AsyncClient) -> None:
        self.workers = {worker.name: worker.url for worker in deployment.run.read_plan().proxy.workers}
        self._url = f"{deployment.state().endpoint}/v1/completions"
        self._client = client

    def body(self, prompt: list[int], max_tokens: int = 4, **more: Any) -> dict[str, Any]:
        return {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            **more,
        }

    async def ask(self, prompt: list[int], max_tokens: int = 4) -> list[int]:
        answer = await self._client.post(self._url, json=self.body(prompt, max_tokens, return_token_ids=True))
        assert answer.status_code == 200, answer.text
        ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return ids

    async def leave(self, prompt: list[int], after: float, *, stream: bool) -> None:
        """Closes the connection after so many seconds, wherever the request is by then."""
        task = asyncio.ensure_future(self._client.post(self._url, json=self.body(prompt, 400, stream=stream)))
        await asyncio.wait({task}, timeout=after)
        task.cancel()
        await asyncio.wait({task})

    async def known(self, worker: str) -> dict[str, Any]:
        """What the proxy knows of it."""
        workers = (await self._client.get(self._url.replace("/v1/completions", "/workers"))).json()["workers"]
        return next(candidate for candidate in workers if candidate["name"] == worker)

    async def served(self, worker: str) -> int:
        """Requests that the proxy has ever sent to it."""
        return int((await self.known(worker))["served"])

    async def computed(self) -> float:
        """Requests that the prefills have ever finished."""
        return sum([await self.metric(name, COMPUTED) for name in self.workers if name.startswith("prefill")])

    async def metric(self, worker: str, pattern: str) -> float:
        text = (await self._client.get(f"{self.workers[worker]}/metrics")).text
        return sum(float(value) for value in re.findall(rf"^vllm:{pattern} (\S+)$", text, re.M))

    async def hits(self) -> tuple[float, float]:
        """Prompt tokens that prefills had in their own caches, and all of them."""
        names = [name for name in self.workers if name.startswith("prefill")]
        cached = [
            await self.metric(name, r'prompt_tokens_by_source_total\{.*source="local_cache_hit".*\}') for name in names
        ]
        computed = [
            await self.metric(name, r'prompt_tokens_by_source_total\{.*source="local_compute".*\}') for name in names
        ]
        return sum(cached), sum(cached) + sum(computed)

    async def running(self) -> float:
        counts = [await self.metric(name, r"num_requests_(?:running|waiting)\{.*\}") for name in self.workers]
        return sum(counts)

    async def used(self) -> dict[str, float]:
        return {name: await self.metric(name, r"kv_cache_usage_perc\{.*\}") for name in self.workers}


@asynccontextmanager
async def clients(deployment: Deployment) -> AsyncIterator[Clients]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=600, limits=limits, trust_env=False) as client:
        yield Clients(deployment, client)


def prompt(tokens: int, seed: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(10, 250) for _ in range(tokens)]


def use(deployment: Deployment, policy: str, role: str = "prefill") -> None:
    """Another policy for one pool of the running proxy."""
    path = deployment.run.path / "proxy.json"
    config = json.loads(path.read_text())
    config["routing"][role] = {"kind": policy}
    path.write_text(json.dumps(config))
    deployment.send_signal("proxy", signal.SIGHUP)


async def conversations(asked: Clients, seed: int) -> float:
    """The share of prompt tokens that prefills had: sessions that take turns, each turn the one before and more."""
    before_hits, before_all = await asked.hits()
    histories = [prompt(2 * BLOCK, seed + number) for number in range(SESSIONS)]
    order = random.Random(seed)
    for turn in range(TURNS):
        # Not in the same order every time, or taking turns would bring each session back to its worker by chance.
        for number in order.sample(range(SESSIONS), SESSIONS):
            answer = await asked.ask(histories[number])
            histories[number] += answer + prompt(2 * BLOCK, seed + 100 * (turn + 1) + number)
    after_hits, after_all = await asked.hits()
    return (after_hits - before_hits) / (after_all - before_all)


@pytest.mark.full
def test_prefix_aware_and_kv_events_raise_the_hit_rate_over_round_robin(tiny: Deployment) -> None:
    async def rates() -> dict[str, float]:
        async with clients(tiny) as asked:
            rates = {}
            for number, policy in enumerate(("kv_events", "prefix_aware", "round_robin")):
                use(tiny, policy)
                rates[policy] = await conversations(asked, 10_000 * (number + 1))
            return rates

    hit_rates = asyncio.run(rates())
    print("hit rates on prefill:", {name: round(rate, 3) for name, rate in hit_rates.items()})
    page = httpx.get(f"{tiny.state().endpoint}/metrics", trust_env=False, timeout=60).text
    for policy in hit_rates:
        assert re.search(rf'routing_decisions_total{{policy="{policy}",role="prefill"', page)
    # A session's second half and later turns are held by one prefill only.
    assert hit_rates["kv_events"] > hit_rates["round_robin"] * 1.2
    assert hit_rates["prefix_aware"] > hit_rates["round_robin"] * 1.2


async def clean(asked: Clients, before: dict[str, float]) -> float:
    """Seconds until nothing runs and no block is used beyond those of before."""
    began = time.monotonic()
    while await asked.running():
        assert time.monotonic() - began < WAIT_SECONDS
    idle = time.monotonic() - began
    # Gauges of an idle engine are old: each engine gets one more tiny request.
    for _ in range(8):
        await asked.ask(prompt(5, 1), 1)
    while any(used > before[name] + 0.005 for name, used in (await asked.used()).items()):
        await asked.ask(prompt(5, 1), 1)
        assert time.monotonic() - began < WAIT_SECONDS
    return idle


def test_a_hundred_clients_who_leave_during_prefill_do_not_delay_the_next(tiny: Deployment) -> None:
    async def departures() -> tuple[float, float, float, float]:
        async with clients(tiny) as asked:
            began = time.monotonic()
            await asked.ask(prompt(300, 50_000))
            alone = time.monotonic() - began
            before, computed = await asked.used(), await asked.computed()
            await asyncio.gather(
                *(asked.leave(prompt(1500, 51_000 + number), 0.5, stream=number % 2 == 0) for number in range(CLIENTS))
            )
            began = time.monotonic()
            await asked.ask(prompt(300, 50_001))
            took = time.monotonic() - began
            computed = await asked.computed() - computed - 1  # without the next one
            return alone, took, computed, await clean(asked, before)

    alone, took, computed, idle = asyncio.run(departures())
    print(f"next request after {took:.2f} s, {alone:.2f} s alone; nothing runs {idle:.2f} s later")
    print(f"{computed:.0f} prompts were computed for nobody")
    # Without care for them the next one waits for all of their prompts, or for the abort timeout.
    assert computed < CLIENTS / 2
    assert took < ABORT_SECONDS


@pytest.mark.full
def test_clients_who_leave_at_random_moments_leave_nothing(tiny: Deployment) -> None:
    async def departures() -> float:
        async with clients(tiny) as asked:
            before = await asked.used()
            dice = random.Random(7)
            await asyncio.gather(
                *(
                    asked.leave(prompt(600, 60_000 + number), dice.uniform(0, 3), stream=number % 2 == 0)
                    for number in range(40)
                )
            )
            return await clean(asked, before)

    idle = asyncio.run(departures())
    print(f"nothing runs {idle:.2f} s after the last has left")
    deadline = time.monotonic() + WAIT_SECONDS
    while in_flight := [worker["name"] for worker in workers(tiny) if worker["in_flight"]]:
        assert time.monotonic() < deadline, in_flight


def workers(tiny: Deployment) -> list[dict[str, Any]]:
    """What the proxy knows of the engines."""
    workers = httpx.get(f"{tiny.state().endpoint}/workers", trust_env=False, timeout=60).json()["workers"]
    assert len(workers) == 4
    return list(workers)


def test_a_prefill_killed_under_load_costs_no_request(tiny: Deployment) -> None:
    """Nothing had been sent to any of these clients when their prefill died."""
    worker = member(tiny, "prefill-1", "VLLM::Worker")

    async def load() -> list[list[int]]:
        async with clients(tiny) as asked:
            before = await asked.served("prefill-1")

            async def client(number: int) -> list[list[int]]:
                return [await asked.ask(prompt(400, 70_000 + 100 * number + turn), 8) for turn in range(3)]

            running = [asyncio.ensure_future(client(number)) for number in range(6)]
            while await asked.served("prefill-1") == before:
                pass
            assert send(worker, signal.SIGKILL)
            return [answer for answers in await asyncio.gather(*running) for answer in answers]

    answers = asyncio.run(load())
    assert len(answers) == 18
    assert {len(answer) for answer in answers} == {8}


@pytest.mark.parametrize(("name", "title"), [("decode-1", "vllm"), ("decode-0", "VLLM::Worker")])
def test_a_decode_killed_while_it_streams_ends_its_streams_by_an_error_and_costs_no_other_request(
    tiny: Deployment, faults: Path, name: str, title: str
) -> None:
    """Its API server, whose connections break, or its worker, of whose end vLLM may speak. It comes back."""
    use(tiny, "round_robin", "decode")
    victim = tiny.id_of(name) if title == "vllm" else member(tiny, name, title)
    seed = 90_000 if title == "vllm" else 95_000

    async def scene() -> str:
        async with reached(tiny) as asked:
            sends = [asked.request(prompt(200, seed + number), STREAM_TOKENS) for number in range(STREAMS)]
            late = [asked.request(prompt(LATE_PROMPT, seed + 100 + number), LATE_TOKENS) for number in range(LATE)]
            killed = await kill(asked, name, victim, sends, late, faults / kv_faults.HOLD_STEPS)
            more = [asked.request(prompt(300, seed + 200 + number), 4) for number in range(4)]
            assert {len(answer) for answer in await asyncio.gather(*map(asked.ask, more))} == {4}
            living = [prefill for prefill in asked.prefills if (await asked.workers())[prefill]["state"] == "ready"]
            await asked.free(living, killed.answered, ABORT_SECONDS + WAIT_SECONDS)
            free = f"nothing is left on {living} {time.monotonic() - killed.at:.2f} s after the kill"
            await assert_reported(asked, killed)
            if title != "vllm":
                return free  # how one comes back does not depend on how it went
            # The proxy's own error is the end; after its own error vLLM says [DONE].
            assert all("error" in stream.events[-1] for stream in killed.lost)
            return f"{free}; it serves again after {await served_again(asked) - killed.at:.1f} s"

    async def served_again(asked: Reached) -> float:
        """Without another attempt; when it was back."""
        await asked.back(name)
        back = time.monotonic()
        use(tiny, "round_robin")
        more = [asked.request(prompt(300, seed + 300 + number), 4) for number in range(4)]
        await asyncio.gather(*map(asked.ask, more))
        lines = await asked.lines(more)
        assert {line["prefill"] for line in lines.values()} == set(asked.prefills)
        assert name in {line["decode"] for line in lines.values()}
        assert {line["attempts"] for line in lines.values()} == {1}
        await asked.free(list(asked.engines), time.monotonic(), FREE_SECONDS)
        return back

    print(asyncio.run(scene()))
    if title == "vllm":
        deadline = time.monotonic() + WAIT_SECONDS
        while tiny.events("phase")[-1]["phase"] != "ready":
            assert time.monotonic() < deadline, tiny.events("phase")
        _, status = status_of_all(NAME)
        assert status["phase"] == "ready"
        assert sum(status["processes"]["prefill-1"]["engine"]["prompt_tokens"].values()) > 0
