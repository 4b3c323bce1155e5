"""The official clients, OpenAI's and Anthropic's, are served as by vLLM itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

import anthropic
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.proxy.deployment import MODEL, Deployment

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Say something"}]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(tmp_path_factory.mktemp("proxy")) as deployment:
        yield deployment.up(control=True)


@pytest.fixture
def client(shared: Deployment) -> Iterator[openai.OpenAI]:
    """One deployment for all; its engines are as before after each test."""
    with openai.OpenAI(base_url=f"{shared.proxy.url}/v1", api_key="client", max_retries=0, timeout=90) as client:
        yield client
    shared.decodes[0].script(drop_after=0, kv_fails=0)
    for fake in shared.fakes:
        shared.proxy.push(fake.name, "ready")
    shared.idle()


def test_streamed_chat_equals_plain_chat(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=20)
    with client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=20, stream=True) as stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == plain.choices[0].message.content
    assert len(text) == 20


def test_completions(client: openai.OpenAI) -> None:
    plain = client.completions.create(model=MODEL, prompt="Once upon", max_tokens=5)
    with client.completions.create(model=MODEL, prompt="Once upon", max_tokens=5, stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == plain.choices[0].text
    assert [model.id for model in client.models.list()] == [MODEL]


def test_models_are_known_before_any_engine_is_ready(deployment: Deployment) -> None:
    deployment.up(control=True)
    for fake in deployment.fakes:
        deployment.proxy.push(fake.name, "starting")
    (model,) = deployment.proxy.http.get("/v1/models").json()["data"]
    assert (model["id"], model["owned_by"]) == (MODEL, "pdserve")


def test_errors_have_the_clients_types(client: openai.OpenAI, shared: Deployment) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="a", max_tokens=10**6)
    assert "maximum context length" in refused.value.message
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    shared.proxy.push("decode-0", "dead")
    with pytest.raises(openai.InternalServerError) as unavailable:
        client.completions.create(model=MODEL, prompt="a")
    assert unavailable.value.status_code == 503


def test_a_stream_that_breaks_raises(client: openai.OpenAI, shared: Deployment) -> None:
    shared.decodes[0].script(drop_after=2)
    with (
        client.completions.create(model=MODEL, prompt="a", max_tokens=9, stream=True) as stream,
        pytest.raises(openai.APIError, match="closed the connection"),
    ):
        for _ in stream:
            pass


# --- anthropic's official client on /v1/messages, and OpenAI's on /v1/responses, are served as by vLLM itself


QUESTION = "Say something about foxes and dogs"


@pytest.fixture
def claude(client: openai.OpenAI, shared: Deployment) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=shared.proxy.url, api_key="client", max_retries=0, timeout=90) as claude:
        yield claude


def message(claude: anthropic.Anthropic, question: str = QUESTION, **more: Any) -> anthropic.types.Message:
    messages: list[anthropic.types.MessageParam] = [{"role": "user", "content": question}]
    return cast(anthropic.types.Message, claude.messages.create(model=MODEL, max_tokens=20, messages=messages, **more))


def text_of(answer: anthropic.types.Message) -> str:
    (block,) = answer.content
    assert block.type == "text"
    return block.text


def test_a_streamed_message_equals_a_plain_one(claude: anthropic.Anthropic, shared: Deployment) -> None:
    plain = message(claude, system="Be brief")
    with claude.messages.stream(
        model=MODEL, max_tokens=20, system="Be brief", messages=[{"role": "user", "content": QUESTION}]
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert (len(text), text_of(final)) == (20, text)
    assert text == text_of(plain)
    assert (plain.stop_reason, final.stop_reason) == ("max_tokens", "max_tokens")
    assert shared.decodes[0].transferred() > 0


def test_both_legs_of_a_message_see_the_same_prompt(claude: anthropic.Anthropic, shared: Deployment) -> None:
    message(claude, system="Be brief", stop_sequences=["x"])
    prefill, decode = (fake.requests()[-1]["body"] for fake in shared.fakes)
    assert prefill["system"] == decode["system"] == "Be brief"
    assert (prefill["max_tokens"], prefill["stream"]) == (1, False)
    assert "stop_sequences" not in prefill


def test_input_tokens_are_what_prefill_computed_and_cached(claude: anthropic.Anthropic, shared: Deployment) -> None:
    def counted() -> int:
        text = shared.proxy.http.get("/metrics").text
        return int(float(text.split("\npdserve_proxy_prompt_tokens_total ")[1].split("\n")[0]))

    before = counted()
    first, second = (message(claude, "Which of these was asked before?").usage for _ in range(2))
    assert (first.cache_read_input_tokens, (second.cache_read_input_tokens or 0) > 0) == (0, True)
    assert second.input_tokens + (second.cache_read_input_tokens or 0) == first.input_tokens
    assert counted() - before == 2 * first.input_tokens, "cached tokens are tokens of a prompt"


def test_a_refused_message_has_anthropics_type(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        claude.messages.create(model=MODEL, max_tokens=10**6, messages=[{"role": "user", "content": "a"}])
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["type"] == "error"
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    assert "maximum context length" in refused.value.body["error"]["message"]
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="other", max_tokens=1, messages=[{"role": "user", "content": "a"}])


def test_a_message_stream_that_breaks_raises(claude: anthropic.Anthropic, shared: Deployment) -> None:
    shared.decodes[0].script(drop_after=2)
    with (
        claude.messages.stream(model=MODEL, max_tokens=9, messages=[{"role": "user", "content": "a"}]) as stream,
        pytest.raises(anthropic.APIStatusError, match="closed the connection"),
    ):
        stream.until_done()


def test_a_streamed_response_equals_a_plain_one(client: openai.OpenAI, shared: Deployment) -> None:
    plain = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=20)
    kinds, text = [], ""
    with client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=20, stream=True) as stream:
        for event in stream:
            kinds.append(event.type)
            text += event.delta if event.type == "response.output_text.delta" else ""
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert (text, len(text)) == (plain.output_text, 20)
    assert shared.decodes[0].transferred() > 0


def test_cached_tokens_of_a_response_are_those_of_prefill(client: openai.OpenAI) -> None:
    question, cached = "Has this response a prompt of its own?", []
    for _ in range(2):
        usage = client.responses.create(model=MODEL, input=question, max_output_tokens=2).usage
        assert usage is not None
        cached.append(usage.input_tokens_details.cached_tokens)
    assert cached[0] == 0
    assert 0 < cached[1] < len(question) + 20


def test_a_streamed_response_has_a_status_until_its_kv_is_known(deployment: Deployment) -> None:
    """vLLM sends response.created at once, whatever becomes of the prefill."""
    deployment.up(prefill={"hold": "prefill"})
    body = {"model": MODEL, "input": QUESTION, "max_output_tokens": 4, "stream": True}
    with deployment.proxy.open("/v1/responses", body) as connection:
        deployment.decodes[0].wait(waiting=1)
        deployment.prefills[0].wait(waiting=1)
        deployment.prefills[0].end()
        assert connection.recv(65_536).startswith(b"HTTP/1.1 502 ")


def test_a_response_stream_that_breaks_ends_with_an_error_event(client: openai.OpenAI, shared: Deployment) -> None:
    shared.decodes[0].script(drop_after=2)
    body = {"model": MODEL, "input": QUESTION, "max_output_tokens": 9, "stream": True}
    with shared.proxy.http.stream("POST", "/v1/responses", json=body) as answer:
        *_, before, name, data = [line for line in answer.iter_lines() if line]
    assert name == "event: error"
    event = json.loads(data.removeprefix("data: "))
    assert event["sequence_number"] == json.loads(before.removeprefix("data: "))["sequence_number"] + 1
    assert (event["type"], event["code"]) == ("error", "BadGatewayError")
    assert "closed the connection" in event["message"]
    with client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=9, stream=True) as stream:
        *_, last = stream
    assert last.type == "error"
