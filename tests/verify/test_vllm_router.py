"""What `verify` asks of vllm-router. The router itself is proven in tests/launch/test_vllm_router.py."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from pdserve.verify.target import Target, read_stream
from tests.bench.evidence import plan
from tests.verify.deployment import Deployment


@pytest.mark.process
def test_a_router_that_is_not_ready_is_sent_nothing(deployment: Deployment) -> None:
    """pdserve's own proxy has no /readiness, which is where the router says that it has workers."""
    report = deployment.up(proxy_kind="vllm-router", cached=False).verify()
    endpoints, *rest = report.proofs
    assert endpoints.status == "failed"
    assert "/readiness): HTTP 404" in endpoints.reason
    assert {proof.status for proof in rest} == {"not-proven"}
    assert deployment.engines["prefill-0"].requests() == []


def test_the_key_is_for_engines_and_not_for_the_router() -> None:
    """An engine's URL may begin with the router's."""
    keys: dict[str, str | None] = {}

    def answer(request: httpx.Request) -> httpx.Response:
        keys[f"{request.url.port} {request.url.path}"] = request.headers.get("authorization")
        return httpx.Response(200, text='data: {"choices": []}\n\ndata: [DONE]\n\n')

    async def ask() -> None:
        routed = plan(proxy_kind="vllm-router")
        routed = routed.model_copy(update={"proxy": routed.proxy.model_copy(update={"port": 3000})})
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            target = Target(routed, client, "key")
            await target.get("http://127.0.0.1:30000", "/health")
            await target.get(target.proxy_url, "/readiness")
            await read_stream(target, (1,), "stream", 1)

    asyncio.run(ask())
    assert keys == {"30000 /health": "Bearer key", "3000 /readiness": None, "3000 /v1/completions": None}
