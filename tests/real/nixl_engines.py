"""Two engines with NIXL between them, behind the proxy: what they count, and clients that leave."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from typing import Any

import httpx

from pdserve.observe.engine_metrics import engine_snapshot
from tests.launch.deployment import Deployment, pdserve, read_json

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


def assert_all_proven() -> None:
    """By `pdserve verify`, of the deployment that serves."""
    code, output = pdserve("verify", "--json")
    assert code == 0, output
    proofs = {proof["name"]: proof["status"] for proof in read_json(output)["proofs"]}
    assert proofs == dict.fromkeys(("endpoints", "requests", "transfer", "output", "clean"), "proven")


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
