"""What a client may not send: a clear 400 (or 413, 404, 405) in OpenAI's shape, and no engine hears of it.

And what cannot be split over two engines: one answers it, or says what is wrong with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.proxy.deployment import KEY, MODEL, Deployment
from tests.tables import each_row

pytestmark = pytest.mark.process

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One deployment for all of this module: nothing here may harm it."""
    folder: Path = tmp_path_factory.mktemp("proxy")
    with Deployment(folder) as deployment:
        yield deployment.up(max_body_bytes=200_000)


def judged_by_an_engine(shared: Deployment, path: str, body: dict[str, Any]) -> httpx.Response:
    """The answer to a request that only decode has seen, byte for byte as the client sent it: what decode says."""
    raw = json.dumps(body).encode()
    untouched = shared.prefills[0].state()["received"]
    answer = shared.proxy.http.post(path, content=raw)
    seen = shared.decodes[0].requests()[-1]
    assert shared.prefills[0].state()["received"] == untouched
    assert seen["raw"] == raw.decode()
    alone = shared.decodes[0].http.post(path, content=raw, headers={"authorization": f"Bearer {KEY}"})
    assert answer.status_code == alone.status_code
    if answer.status_code == 200 and not answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.json()["choices"] == alone.json()["choices"]
    return answer


@each_row(
    "field, value",
    [
        ("n", 2),
        ("n", "2"),
        ("n", True),
        ("best_of", 2),
        ("use_beam_search", True),
        ("prompt_logprobs", 0),
        ("truncate_prompt_tokens", -1),
        ("truncate_prompt_tokens", "-1"),
        ("prompt_embeds", "AAAA"),
        ("stream", "true"),
        ("max_tokens", 0),
        ("max_tokens", "8"),
        ("max_tokens", 1.5),
        ("min_tokens", -1),
        ("stop", 7),
        ("stop", [7]),
        ("stop_token_ids", ["a"]),
        ("stream_options", {"include_usage": True}),
        ("logprobs", True),
        ("ignore_eos", "yes"),
        ("return_token_ids", 1),
        ("logprob_token_ids", 1),
        ("stream_interval", 0),
        ("echo", True),
    ],
)
def test_completions_fields_for_one_engine(shared: Deployment, field: str, value: object) -> None:
    judged_by_an_engine(shared, "/v1/completions", {"prompt": "hi", field: value})


@each_row("prompt", [["a", "b"], [[1], [2]], [1, "a"], [], None, 5, {"a": 1}])
def test_prompts_that_are_not_one_prompt_go_to_one_engine(shared: Deployment, prompt: object) -> None:
    answer = judged_by_an_engine(shared, "/v1/completions", {"prompt": prompt})
    if isinstance(prompt, list) and len(prompt) == 2 and prompt != [1, "a"]:
        assert len(answer.json()["choices"]) == 2


@each_row(
    "field, value",
    [("messages", None), ("messages", "hi"), ("n", 3), ("logprobs", 5), ("echo", True), ("prompt_logprobs", 1)],
)
def test_chat_fields_for_one_engine(shared: Deployment, field: str, value: object) -> None:
    judged_by_an_engine(shared, "/v1/chat/completions", CHAT | {field: value})


@each_row("name", ["kv_transfer_params", r"\u006bv_transfer_params", "ec_transfer_params"])
def test_smuggled_transfer_parameters_reach_no_engine(shared: Deployment, name: str) -> None:
    """Sent on, these kill a producer's EngineCore."""
    body = (
        f'{{"model": "{MODEL}", "prompt": "hi", "{name}": {{"do_remote_prefill": true, "evil": 1}}, "max_tokens": 2}}'
    )
    assert shared.proxy.http.post("/v1/completions", content=body).status_code == 200
    for fake in shared.fakes:
        sent = fake.requests()[-1]["body"]
        assert "evil" not in json.dumps(sent)
        assert "ec_transfer_params" not in sent
        assert fake.process.poll() is None


def test_transfer_parameters_in_vllm_xargs_reach_no_engine(shared: Deployment) -> None:
    """vLLM merges vllm_xargs into the mapping that carries kv_transfer_params."""
    extra = {"kv_transfer_params": "evil", "ec_transfer_params": "evil", "mine": 1}
    assert shared.complete("hi", vllm_xargs=extra).status_code == 200
    for fake in shared.fakes:
        assert fake.requests()[-1]["body"]["vllm_xargs"] == {"mine": 1}


@each_row("request_id", ["", "a b", "é", "x" * 300])
def test_a_request_id_that_could_do_harm_is_replaced(shared: Deployment, request_id: str) -> None:
    headers = [(b"x-request-id", request_id.encode("latin-1"))]
    answer = shared.proxy.http.post("/v1/completions", json={"prompt": "hi"}, headers=headers)
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] not in ("", request_id)
