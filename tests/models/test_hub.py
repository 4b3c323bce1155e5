"""config.json from the hub, by a hub that answers as it should, refuses, or is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from pdserve.errors import PreflightError
from pdserve.models.files import fetch_config
from tests.tables import each_row

TOKEN = "hf_secret"


def fetch(
    answer: Callable[[httpx.Request], httpx.Response], separate: httpx.Response | None = None, **environ: str
) -> dict[str, object]:
    """`separate`: what the hub answers for hf_quant_config.json; None: it has none."""

    def hub(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/hf_quant_config.json"):
            return separate or httpx.Response(404)
        return answer(request)

    return fetch_config("org/name", "v 1", environ, httpx.MockTransport(hub))


def test_url_and_token() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"model_type": "llama"})

    assert fetch(answer, HF_TOKEN=TOKEN, HF_ENDPOINT="https://mirror.example/") == {"model_type": "llama"}
    assert str(seen[0].url) == "https://mirror.example/org/name/resolve/v%201/config.json"
    assert seen[0].headers["authorization"] == f"Bearer {TOKEN}"


def test_the_quantization_that_modelopt_wrote_beside_it() -> None:
    separate = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    made = fetch(lambda _: httpx.Response(200, json={"model_type": "llama"}), httpx.Response(200, json=separate))
    assert made == {"model_type": "llama", "quantization_config": separate}
    own = {"quantization_config": {"quant_method": "fp8"}}
    assert fetch(lambda _: httpx.Response(200, json=own), httpx.Response(200, json=separate)) == own
    with pytest.raises(PreflightError) as refused:
        fetch(lambda _: httpx.Response(200, json={}), httpx.Response(200, content=b"<html>"))
    assert "hf_quant_config.json that huggingface.co answers is no JSON" in str(refused.value.cause)


def test_a_token_does_not_follow_to_another_host() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        if len(seen) == 1:
            return httpx.Response(302, headers={"location": "https://storage.example/file"})
        return httpx.Response(200, json={})

    fetch(answer, HF_TOKEN=TOKEN)
    assert "authorization" not in seen[1].headers


@each_row(
    "status, cause, todo",
    [(401, "gated or private", "HF_TOKEN"), (403, "gated or private", "HF_TOKEN"), (404, "404", "model.revision")],
)
def test_refusals(status: int, cause: str, todo: str) -> None:
    with pytest.raises(PreflightError) as refused:
        fetch(lambda _: httpx.Response(status), HF_TOKEN=TOKEN)
    assert cause in str(refused.value.cause)
    assert todo in str(refused.value.todo)
    assert TOKEN not in refused.value.render()


@each_row("answer, environ, cause", [
    (httpx.Response(200, content=b"<html>"), {}, "no JSON"),
    (httpx.Response(200, content=b"[]"), {}, "no JSON"),
    (httpx.ConnectError("no route"), {}, "huggingface.co cannot be reached: no route"),
    (httpx.Response(200, json={}), {"HF_ENDPOINT": "http://mirror:port"}, "HF_ENDPOINT is no URL"),
    (httpx.Response(500), {"HF_ENDPOINT": "https://user:hunter2@mirror.example"}, "mirror.example"),
    (httpx.Response(200, json={}), {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE"),
])  # fmt: skip
def test_what_is_no_answer(answer: httpx.Response | httpx.ConnectError, environ: Any, cause: str) -> None:
    def answered(_: httpx.Request) -> httpx.Response:
        if isinstance(answer, httpx.ConnectError):
            raise answer
        return answer

    with pytest.raises(PreflightError, match=r"config\.json of org/name") as refused:
        fetch(answered, **environ)
    assert cause in refused.value.render()
    assert refused.value.todo
    assert "hunter2" not in refused.value.render()
