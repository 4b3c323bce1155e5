"""NIXL on the real stack: every proof holds, every API is split, and clients that leave leave no blocks behind."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from openai import OpenAI

from pdserve.observe.metrics import engine_snapshot
from pdserve.plan.model import cpu_share
from pdserve.system import procfs
from pdserve.system.process import share_of_cpus
from tests.launch.deployment import REPOSITORY, Deployment, pdserve, read_json
from tests.real import kv_faults
from tests.real.conftest import brought_up

pytestmark = pytest.mark.real

NAME = "tiny-cpu-nixl"
WORDS = "the quick brown fox jumps over the lazy dog and "
API_BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": WORDS * 20, "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": WORDS * 20}], "max_tokens": 3},
    "/v1/responses": {"input": WORDS * 20, "max_output_tokens": 3},
    "/v1/messages": {"messages": [{"role": "user", "content": WORDS * 20}], "max_tokens": 3},
}
LEFT_SECONDS = 120.0
"""A limit: a worker that is held for 300 s ends its engine."""
EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"
ENDED = 'pdserve_patch_effects_total{.*effect="leases-ended".*}'
"""Leases that nixl-abandoned-kv has ended; vLLM counts them as expired."""
DEPARTURES = 8
CROWD = 40
MEDIUM, LONG = WORDS * 30, WORDS * 80
"""Prompts that prefill computes in about a second, and in seconds: longer than the proxy waits for the end of one whose
client has left."""
COMPUTED = 'vllm:request_success_total{.*finished_reason="length".*}'
"""Requests that were not aborted."""


class Engines:
    """The proxy as clients reach it, and its engines as nobody should."""

    def __init__(self, deployment: Deployment) -> None:
        self.endpoint = deployment.state().endpoint
        self.urls = {worker.name: worker.url for worker in deployment.run.read_plan().proxy.workers}
        self._key = {"Authorization": f"Bearer {deployment.run.read_key()}"}

    def metric(self, name: str, metric: str) -> float:
        text = httpx.get(f"{self.urls[name]}/metrics", trust_env=False, timeout=60).text
        return sum(float(value) for value in re.findall(rf"^{metric}(?:{{.*}})? (\S+)$", text, re.MULTILINE))

    def tokens(self, source: str) -> float:
        """Prompt tokens of decode, by where they came from."""
        return self.metric("decode-0", f'vllm:prompt_tokens_by_source_total{{.*source="{source}".*}}')

    def prompt_tokens_of(self, path: str) -> tuple[float, float]:
        """Of a request of one API: prompt tokens whose KV decode got, and those that it computed."""
        before = self.tokens("external_kv_transfer"), self.tokens("local_compute")
        body = {"model": "tiny", "cache_salt": path.replace("/", "-"), "temperature": 0} | API_BODIES[path]
        answer = httpx.post(f"{self.endpoint}{path}", json=body, timeout=120, trust_env=False)
        assert answer.status_code == 200, answer.text
        return self.tokens("external_kv_transfer") - before[0], self.tokens("local_compute") - before[1]

    def expired(self) -> float:
        """Leases of prefill that nothing but their end has ended."""
        return self.metric("prefill-0", EXPIRED) - self.metric("prefill-0", ENDED)

    async def used(self) -> tuple[float, ...]:
        """Running requests and KV use of both engines. Gauges are set by steps, so each makes one first. One that does
        not answer counts as in use: on two cores NIXL's threads hold an API server up for seconds."""
        numbers: list[float] = []
        async with httpx.AsyncClient(headers=self._key, timeout=30, trust_env=False) as client:
            for url in self.urls.values():
                await client.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 1})
                now = await engine_snapshot(url, client)
                if now.unfinished is None or now.kv_cache_usage is None:
                    return (1.0,)
                numbers += (now.unfinished, now.kv_cache_usage)
        return tuple(numbers)

    async def left(self) -> None:
        """Returns when the proxy has let go of all that was asked, and prefill's API server has seen what that did to
        its connections: it answers requests in the order in which they and the ends of others come."""
        async with asyncio.timeout(LEFT_SECONDS), httpx.AsyncClient(timeout=LEFT_SECONDS, trust_env=False) as client:
            while any(
                worker["in_flight"] for worker in (await client.get(f"{self.endpoint}/workers")).json()["workers"]
            ):
                await asyncio.sleep(0.05)
            for _ in range(3):
                assert (await client.get(f"{self.urls['prefill-0']}/health")).status_code == 200

    async def leave(self, body: dict[str, Any], seconds: float) -> None:
        """A client that sends a request and leaves after that time."""
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await client.post(f"{self.endpoint}/v1/completions", json={"model": "tiny"} | body)


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a test tells prefill which fault to have."""
    return tmp_path_factory.mktemp("faults") / "orders"


@pytest.fixture(scope="module")
def tiny(home: Path, faults: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    recipe = tmp_path_factory.mktemp("recipe") / f"{NAME}.yaml"
    document = {
        "extends": str(REPOSITORY / "recipes" / f"{NAME}.yaml"),
        "name": NAME,
        "prefill": {"env": kv_faults.installed(faults)},
    }
    recipe.write_text(yaml.safe_dump(document))
    yield from brought_up(NAME, home, recipe)


@pytest.fixture
def engines(tiny: Deployment) -> Engines:
    return Engines(tiny)


def test_each_engine_keeps_to_its_part_of_the_cpus(tiny: Deployment) -> None:
    """Also its workers, which NIXL binds to one core of the machine, the same for all engines."""
    plan = tiny.run.read_plan()
    for name in (worker.name for worker in plan.proxy.workers):
        part = share_of_cpus(os.sched_getaffinity(0), cpu_share(plan, name))
        root = tiny.id_of(name).pid
        threads = procfs.threads({root, *procfs.descendants(root)})
        assert {cpu for thread in threads for cpu in os.sched_getaffinity(thread)} == part, name


def test_every_proof_is_proven(tiny: Deployment) -> None:
    code, output = pdserve("verify", "--json")
    assert code == 0, output
    proofs = {proof["name"]: proof["status"] for proof in read_json(output)["proofs"]}
    assert proofs == dict.fromkeys(("endpoints", "requests", "transfer", "output", "clean"), "proven")


@pytest.mark.parametrize("path", API_BODIES)
def test_with_each_api_decode_gets_the_place_of_the_kv(engines: Engines, path: str) -> None:
    transferred, computed = engines.prompt_tokens_of(path)
    assert transferred >= 128
    assert computed <= 1


def test_a_streamed_answer_is_the_plain_one_and_its_cached_tokens_are_prefills(tiny: Deployment) -> None:
    with OpenAI(base_url=f"{tiny.state().endpoint}/v1", api_key="none", max_retries=0) as client:
        salt = {"cache_salt": "streamed"}  # other tests send this prompt too
        plain = client.completions.create(
            model="tiny", prompt=WORDS * 30, max_tokens=12, temperature=0, extra_body=salt
        )
        options = {"include_usage": True}
        chunks = list(
            client.completions.create(
                model="tiny",
                prompt=WORDS * 30,
                max_tokens=12,
                temperature=0,
                stream=True,
                extra_body={"stream_options": options, **salt},
            )
        )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == plain.choices[0].text
    first, second = plain.usage, chunks[-1].usage
    assert first is not None
    assert second is not None
    assert first.prompt_tokens_details is not None
    assert second.prompt_tokens_details is not None
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens == first.prompt_tokens // 128 * 128


def test_clients_that_leave_at_any_moment_leave_no_block_behind(engines: Engines) -> None:
    """At moments spread over a whole request: during prefill, between the legs, on decode. What they held comes free,
    and not because a lease has ended, which prefill counts: so it is soon, as soon as the machine is fast.

    One of them may wait for its lease: the proxy has hung up and listened on for its last moment, and prefill's API
    server was held up for longer. Neither side knows then that an answer was lost.
    """

    async def depart() -> list[float]:
        began = time.monotonic()
        await engines.leave({"prompt": MEDIUM + "0", "max_tokens": 8}, 60)
        whole, freed = time.monotonic() - began, []
        for number in range(DEPARTURES):
            body = {"prompt": MEDIUM + str(number), "max_tokens": 200, "stream": number % 2 == 0}
            await engines.leave(body | {"cache_salt": f"leaves-{number}"}, whole * (number + 1) / DEPARTURES)
            left = time.monotonic()
            while any(await engines.used()):
                pass
            freed.append(time.monotonic() - left)
        return sorted(freed)

    expired = engines.expired()
    freed = asyncio.run(depart())
    by_lease = engines.expired() - expired
    print(f"free after {freed[len(freed) // 2]:.2f} s, at the latest {freed[-1]:.2f} s; by lease {by_lease:.0f}")
    assert by_lease <= 1


@pytest.mark.full
def test_clients_that_leave_during_prefill_do_not_delay_the_next_one(engines: Engines, faults: Path) -> None:
    """It waits for a few prompts of the crowd and not for most of them: they are not computed for nobody. Counted, and
    with a prefill that is held until all have left, because on few cores NIXL's own threads can hold anything up for
    half a minute."""

    async def depart() -> tuple[float, float]:
        began = time.monotonic()
        await engines.leave({"prompt": LONG, "max_tokens": 1, "cache_salt": "one"}, 60)
        single_seconds = time.monotonic() - began
        bodies = [{"prompt": LONG, "max_tokens": 8, "cache_salt": f"crowd-{number}"} for number in range(CROWD)]
        with kv_faults.held(faults / kv_faults.HOLD_STEPS):
            await asyncio.gather(*(engines.leave(body, single_seconds) for body in bodies))
            await engines.left()
        began = time.monotonic()
        async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
            body = {"model": "tiny", "prompt": "the next one", "max_tokens": 2}
            answer = await client.post(f"{engines.endpoint}/v1/completions", json=body)
        assert answer.status_code == 200
        return single_seconds, time.monotonic() - began

    before = engines.metric("prefill-0", COMPUTED)
    single_seconds, waited = asyncio.run(depart())
    # Without the one before the crowd, and the next.
    computed = engines.metric("prefill-0", COMPUTED) - before - 2
    print(
        f"a prompt takes {single_seconds:.2f} s, the next client waited {waited:.2f} s, "
        f"{computed:.0f} of {CROWD} were computed"
    )
    assert computed < CROWD / 2
