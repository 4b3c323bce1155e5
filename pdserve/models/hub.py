"""A model's config.json from the hub. It is asked only with --online."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from pydantic_core import from_json

from pdserve.errors import PreflightError
from pdserve.models import config_json, quantization
from pdserve.models.files import MAIN

if TYPE_CHECKING:
    import httpx

ENDPOINT = "https://huggingface.co"
_SECONDS = 20
_PROXY = "check HF_ENDPOINT: a proxy may answer in the hub's place"
_OFFLINE = ("1", "true", "yes", "on")


def fetch_config(
    model: str, revision: str | None, environ: Mapping[str, str], transport: httpx.BaseTransport | None = None
) -> dict[str, Any]:
    """With that of hf_quant_config.json as vLLM adds it. HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE of `environ` count,
    as for huggingface_hub. Raises PreflightError."""

    def get(file: str, missing_ok: bool = False) -> httpx.Response | None:
        return _get(model, revision, file, environ, transport, missing_ok)

    answer = get("config.json")
    assert answer is not None
    config = config_json.read(answer.content, "model.id", "correct model.id or model.revision")
    if config is None:
        raise _failed(model, f"what {_asked(answer)} answers is no JSON object", _PROXY)
    if config.get(quantization.KEY) is None and (separate := get(quantization.SEPARATE, missing_ok=True)) is not None:
        try:
            return quantization.with_separate(config, from_json(separate.content))
        except ValueError as error:
            what = f"the {quantization.SEPARATE} that {_asked(separate)} answers is no JSON: {error}"
            raise _failed(model, what, _PROXY) from error
    return config


def _get(
    model: str,
    revision: str | None,
    file: str,
    environ: Mapping[str, str],
    transport: httpx.BaseTransport | None,
    missing_ok: bool,
) -> httpx.Response | None:
    """None: there is no such file, and that is `missing_ok`."""
    import httpx

    if environ.get("HF_HUB_OFFLINE", "").lower() in _OFFLINE:
        raise _failed(model, "HF_HUB_OFFLINE forbids to ask the hub", "unset HF_HUB_OFFLINE, or leave out --online")
    endpoint = (environ.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")
    token = environ.get("HF_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        url = httpx.URL(f"{endpoint}/{model}/resolve/{quote(revision or MAIN, safe='')}/{file}")
        with httpx.Client(transport=transport, timeout=_SECONDS, follow_redirects=True) as client:
            answer = client.get(url, headers=headers)
        if missing_ok and answer.status_code == httpx.codes.NOT_FOUND:
            return None
        return answer.raise_for_status()
    except httpx.HTTPStatusError as error:
        code = error.response.status_code
        if code in (401, 403):
            raise _failed(
                model,
                f"{url.host} answers {code}: the model is gated or private, or it does not exist",
                "set HF_TOKEN to a token that may read it, or correct model.id",
            ) from error
        raise _failed(
            model, f"{url.host} answers {code} for {url.path}", "correct model.id or model.revision"
        ) from error
    except httpx.InvalidURL as error:
        raise _failed(
            model, f"HF_ENDPOINT is no URL: {error}", f"unset HF_ENDPOINT, or set it to {ENDPOINT}"
        ) from error
    except httpx.HTTPError as error:
        raise _failed(
            model, f"{url.host} cannot be reached: {error}", "check the network and HF_ENDPOINT, or leave out --online"
        ) from error


def _asked(answer: httpx.Response) -> str:
    """The host, before it sent us to another one."""
    return (answer.history or [answer])[0].url.host


def _failed(model: str, cause: str, todo: str) -> PreflightError:
    return PreflightError(
        f"the config.json of {model} cannot be had from the hub", where="model.id", cause=cause, todo=todo
    )
