"""Answers that are odd, with status 200: an error with the URL and what was wrong, never a traceback or a proof."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx
import pytest

from pdserve.errors import VerifyError
from pdserve.verify.target import Completion, Target, read_stream
from pdserve.verify.trials import make_tokens, max_model_len
from tests.bench.evidence import plan
from tests.tables import each_row
from tests.verify import deployment
from tests.verify.deployment import Deployment

PROMPT = tuple(range(4))
SOUND: dict[str, Any] = {"choices": [{"token_ids": [7]}], "usage": {"prompt_tokens": len(PROMPT)}}


Result = TypeVar("Result")


def asked(body: bytes, ask: Callable[[Target], Awaitable[Result]]) -> Result:
    """What `ask` makes of a deployment that answers everything with `body`."""
    return deployment.asked(lambda request: httpx.Response(200, content=body), ask)


def completed(body: bytes) -> Completion:
    return asked(body, lambda target: target.complete(target.proxy_url, PROMPT, salt="salt", max_tokens=1))


def with_choice(**fields: Any) -> bytes:
    return json.dumps(SOUND | {"choices": [SOUND["choices"][0] | fields]}).encode()


def with_usage(usage: Any) -> bytes:
    return json.dumps(SOUND | {"usage": usage}).encode()


@each_row("body, what", [
    (b"<html>", "something else than JSON"),
    (b"[]", r"JSON that is no object: \[\]"),
    (b'{"choices": [{}], "usage": {"prompt_tokens": 4}}', "choices.0.token_ids: Field required"),
    (with_choice(logprobs={"token_logprobs": [float("nan")]}), "choices.0.logprobs.token_logprobs.0: .*NaN"),
    (with_choice(prompt_logprobs=[{"7": {"logprob": float("nan")}}]), "choices.0.prompt_logprobs.0.7.logprob: "),
    (with_usage({"prompt_tokens": "x"}), 'usage.prompt_tokens: .*"x"'),
    # The end of a text is ignored: an answer that is shorter was broken off.
    (with_choice(token_ids=[], finish_reason="abort"), r"4 prompt tokens and 0 answer .*reason abort\), 4 and 1"),
    (with_choice(token_ids=[7, 7]), "4 prompt tokens and 2 answer tokens"),
    (with_usage({"prompt_tokens": 3}), "3 prompt tokens and 1 answer tokens"),
])  # fmt: skip
def test_a_completion_that_cannot_be_read_or_has_another_length(body: bytes, what: str) -> None:
    with pytest.raises(VerifyError, match=what) as raised:
        completed(body)
    assert raised.value.where == "http://127.0.0.1:1"


@each_row("body", [b"{}", b'{"tokens": ["a"]}', b'{"data": [1]}', b'{"data": [{"max_model_len": "long"}]}', b"\xff"])
@each_row("ask", [max_model_len, lambda target: make_tokens(target, 0, 4)])
def test_tokens_and_models_that_cannot_be_read(ask: Callable[[Target], Awaitable[Any]], body: bytes) -> None:
    with pytest.raises(VerifyError) as raised:
        asked(body, ask)
    assert raised.value.where == "http://127.0.0.1:2"


@each_row("body", [b'{"data": []}', b'{"data": [{"id": "m"}]}', b'{"data": [{"max_model_len": null}]}'])
def test_a_model_without_a_limit(body: bytes) -> None:
    assert asked(body, max_model_len) is None


# --- vllm-router; that itself is proven in tests/launch/test_vllm_router.py


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
