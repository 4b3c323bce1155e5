"""The official client is served as by vLLM itself."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.proxy.deployment import MODEL, PLAIN, Deployment

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Say something"}]


@pytest.fixture
def client(deployment: Deployment) -> Iterator[openai.OpenAI]:
    deployment.up(control=True)
    with openai.OpenAI(
        base_url=f"{deployment.proxy.url}/v1", api_key="client", max_retries=0, http_client=httpx.Client(**PLAIN)
    ) as client:
        yield client


def test_streamed_chat_equals_plain_chat(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=20)
    with client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=20, stream=True) as stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == plain.choices[0].message.content
    assert len(text) == 20


def test_usage_comes_with_the_stream_when_asked_for(client: openai.OpenAI) -> None:
    options = {"include_usage": True}
    with client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=3,
        stream=True,
        stream_options=options,  # type: ignore[call-overload]
    ) as stream:
        usage = [chunk.usage for chunk in stream if chunk.usage]
    assert [chunk.completion_tokens for chunk in usage] == [3]
    assert usage[0].prompt_tokens_details.cached_tokens == 0


def test_completions(client: openai.OpenAI) -> None:
    plain = client.completions.create(model=MODEL, prompt="Once upon", max_tokens=5)
    with client.completions.create(model=MODEL, prompt="Once upon", max_tokens=5, stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == plain.choices[0].text


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_models_are_known_before_any_engine_is_ready(client: openai.OpenAI, deployment: Deployment) -> None:
    for fake in deployment.fakes:
        deployment.proxy.push(fake.name, "starting")
    assert [(model.id, model.owned_by) for model in client.models.list()] == [(MODEL, "pdserve")]


def test_errors_have_the_clients_types(client: openai.OpenAI, deployment: Deployment) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="a", max_tokens=10**6)
    assert "maximum context length" in refused.value.message
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    deployment.proxy.push("decode-0", "dead")
    with pytest.raises(openai.InternalServerError) as unavailable:
        client.completions.create(model=MODEL, prompt="a")
    assert unavailable.value.status_code == 503


def test_a_stream_that_breaks_raises(client: openai.OpenAI, deployment: Deployment) -> None:
    deployment.decodes[0].script(drop_after=2)
    with (
        client.completions.create(model=MODEL, prompt="a", max_tokens=9, stream=True) as stream,
        pytest.raises(openai.APIError, match="closed the connection"),
    ):
        for _ in stream:
            pass
