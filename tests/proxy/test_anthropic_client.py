"""Anthropic's official client on /v1/messages, and OpenAI's on /v1/responses, are served as by vLLM itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

import anthropic
import httpx
import openai
import pytest

from tests.proxy.deployment import MODEL, PLAIN, Deployment

QUESTION = "Say something about foxes and dogs"


@pytest.fixture
def served(deployment: Deployment) -> Deployment:
    return deployment.up()


@pytest.fixture
def client(served: Deployment) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=served.proxy.url, api_key="client", max_retries=0, http_client=httpx.Client(**PLAIN)
    ) as client:
        yield client


@pytest.fixture
def openai_client(served: Deployment) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{served.proxy.url}/v1", api_key="client", max_retries=0, http_client=httpx.Client(**PLAIN)
    ) as client:
        yield client


def message(client: anthropic.Anthropic, **more: Any) -> anthropic.types.Message:
    messages: list[anthropic.types.MessageParam] = [{"role": "user", "content": QUESTION}]
    return cast(anthropic.types.Message, client.messages.create(model=MODEL, max_tokens=20, messages=messages, **more))


def text_of(answer: anthropic.types.Message) -> str:
    (block,) = answer.content
    assert block.type == "text"
    return block.text


def test_a_streamed_message_equals_a_plain_one(client: anthropic.Anthropic, served: Deployment) -> None:
    plain = message(client, system="Be brief")
    with client.messages.stream(
        model=MODEL, max_tokens=20, system="Be brief", messages=[{"role": "user", "content": QUESTION}]
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert (len(text), text_of(final)) == (20, text)
    assert text == text_of(plain)
    assert (plain.stop_reason, final.stop_reason) == ("max_tokens", "max_tokens")
    assert served.decodes[0].transferred() > 0


def test_both_legs_of_a_message_see_the_same_prompt(client: anthropic.Anthropic, served: Deployment) -> None:
    message(client, system="Be brief", stop_sequences=["x"])
    prefill, decode = served.prefills[0].body(), served.decodes[0].body()
    assert prefill["system"] == decode["system"] == "Be brief"
    assert (prefill["max_tokens"], prefill["stream"]) == (1, False)
    assert "stop_sequences" not in prefill
    served.idle()


def test_input_tokens_are_what_prefill_computed_and_cached(client: anthropic.Anthropic) -> None:
    first, second = message(client).usage, message(client).usage
    assert first.cache_read_input_tokens == 0
    prompt = first.input_tokens
    cached = second.cache_read_input_tokens
    assert cached is not None
    assert cached > 0
    assert second.input_tokens + cached == prompt


def test_the_proxy_counts_cached_tokens_of_a_message_as_prompt(client: anthropic.Anthropic, served: Deployment) -> None:
    def counted() -> int:
        text = served.proxy.http.get("/metrics").text
        return int(float(text.split("\npdserve_proxy_prompt_tokens_total ")[1].split("\n")[0]))

    before = counted()
    usage = message(client).usage
    assert counted() - before == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_a_refused_message_has_anthropics_type(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(model=MODEL, max_tokens=10**6, messages=[{"role": "user", "content": "a"}])
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["type"] == "error"
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    assert "maximum context length" in refused.value.body["error"]["message"]
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", max_tokens=1, messages=[{"role": "user", "content": "a"}])


def test_a_message_stream_that_breaks_raises(client: anthropic.Anthropic, served: Deployment) -> None:
    served.decodes[0].script(drop_after=2)
    with (
        client.messages.stream(model=MODEL, max_tokens=9, messages=[{"role": "user", "content": "a"}]) as stream,
        pytest.raises(anthropic.APIStatusError, match="closed the connection"),
    ):
        stream.until_done()


def test_a_message_stream_without_its_kv_has_a_status(client: anthropic.Anthropic, served: Deployment) -> None:
    served.decodes[0].script(kv_fails=1)
    with (
        pytest.raises(anthropic.InternalServerError),
        client.messages.stream(model=MODEL, max_tokens=9, messages=[{"role": "user", "content": "a"}]) as stream,
    ):
        stream.until_done()


def test_a_streamed_response_equals_a_plain_one(openai_client: openai.OpenAI, served: Deployment) -> None:
    plain = openai_client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=20)
    kinds, text = [], ""
    with openai_client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=20, stream=True) as stream:
        for event in stream:
            kinds.append(event.type)
            text += event.delta if event.type == "response.output_text.delta" else ""
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert (text, len(text)) == (plain.output_text, 20)
    assert served.decodes[0].transferred() > 0


def test_cached_tokens_of_a_response_are_those_of_prefill(openai_client: openai.OpenAI) -> None:
    cached = []
    for _ in range(2):
        usage = openai_client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=2).usage
        assert usage is not None
        cached.append(usage.input_tokens_details.cached_tokens)
    assert cached[0] == 0
    assert 0 < cached[1] < len(QUESTION) + 20


def test_a_streamed_response_has_a_status_as_long_as_nothing_is_known_of_its_kv(
    openai_client: openai.OpenAI, served: Deployment
) -> None:
    """vLLM sends response.created at once, whatever becomes of the prefill."""
    served.prefills[0].script(hold="prefill")
    body = {"model": MODEL, "input": QUESTION, "max_output_tokens": 4, "stream": True}
    with served.proxy.open("/v1/responses", body) as connection:
        served.decodes[0].wait(waiting=1)
        served.prefills[0].wait(waiting=1)
        served.prefills[0].end()
        assert connection.recv(65_536).startswith(b"HTTP/1.1 502 ")


def test_a_response_stream_that_breaks_ends_with_an_error_event(
    openai_client: openai.OpenAI, served: Deployment
) -> None:
    served.decodes[0].script(drop_after=2)
    body = {"model": MODEL, "input": QUESTION, "max_output_tokens": 9, "stream": True}
    with served.proxy.http.stream("POST", "/v1/responses", json=body) as answer:
        *_, before, name, data = [line for line in answer.iter_lines() if line]
    assert name == "event: error"
    event = json.loads(data.removeprefix("data: "))
    assert event["sequence_number"] == json.loads(before.removeprefix("data: "))["sequence_number"] + 1
    assert (event["type"], event["code"]) == ("error", "BadGatewayError")
    assert "closed the connection" in event["message"]
    with openai_client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=9, stream=True) as stream:
        *_, last = stream
    assert last.type == "error"
