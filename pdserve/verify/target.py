"""Reach the deployment under proof: where its parts listen, and the requests that proofs send to them.

Answers are read strictly: what is odd is an error with the URL, never a number."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import httpx
from pydantic import BaseModel, Field, StrictInt, ValidationError

from pdserve.errors import VerifyError
from pdserve.observe.metrics import VERIFY_SALT
from pdserve.pd.config.proxy import WorkerConfig
from pdserve.plan.model import Plan
from pdserve.time_limit import time_limit

_SHOWN = 200
_CAUSE = "token ids (return_token_ids) or usage did not come through whole"
Count = Annotated[int, Field(strict=True, ge=0)]
Logprob = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Read = TypeVar("Read", bound=BaseModel)


class PossibleToken(BaseModel):
    """A token that was possible at a place of a prompt."""

    logprob: Logprob


@dataclass(frozen=True)
class Completion:
    """Holds one answer of /v1/completions."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """The logprobs of the tokens; empty when not asked for."""
    prompt_logprobs: tuple[dict[str, PossibleToken] | None, ...]
    prompt_tokens: int
    cached_tokens: int | None
    """Prompt tokens that were not computed by the engine that answered; None: it does not report it."""
    finish_reason: str | None = None


class _Logprobs(BaseModel):
    token_logprobs: tuple[Logprob, ...] | None = None


class _Choice(BaseModel):
    token_ids: tuple[StrictInt, ...]
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    prompt_logprobs: tuple[dict[str, PossibleToken] | None, ...] | None = None


class _Details(BaseModel):
    cached_tokens: Count | None = None


class _Usage(BaseModel):
    prompt_tokens: Count
    prompt_tokens_details: _Details | None = None


class _Answer(BaseModel):
    choices: Annotated[tuple[_Choice, ...], Field(min_length=1)]
    usage: _Usage


class _Tokens(BaseModel):
    tokens: Annotated[tuple[StrictInt, ...], Field(min_length=1)]


class _Card(BaseModel):
    max_model_len: Count | None = None


class _Models(BaseModel):
    data: tuple[_Card, ...]


def read_completion(answer: dict[str, Any], url: str) -> Completion:
    """Read an answer of /v1/completions. Raises VerifyError when it is not one."""
    read = _validate_answer(_Answer, answer, url, "a completion", cause=_CAUSE)
    choice, details = read.choices[0], read.usage.prompt_tokens_details
    return Completion(
        tokens=choice.token_ids,
        logprobs=(choice.logprobs.token_logprobs or ()) if choice.logprobs else (),
        prompt_logprobs=choice.prompt_logprobs or (),
        prompt_tokens=read.usage.prompt_tokens,
        cached_tokens=details.cached_tokens if details else None,
        finish_reason=choice.finish_reason,
    )


def read_tokens(answer: dict[str, Any], url: str) -> tuple[int, ...]:
    """Read the tokens of /tokenize; at least one. Raises VerifyError."""
    return _validate_answer(_Tokens, answer, url, "/tokenize").tokens


def read_max_model_len(answer: dict[str, Any], url: str) -> int | None:
    """Read the limit of /v1/models; None: it has none there. Raises VerifyError."""
    cards = _validate_answer(_Models, answer, url, "/v1/models").data
    return cards[0].max_model_len if cards else None


def json_object(response: httpx.Response, what: str, url: str) -> dict[str, Any]:
    """Return the body of a response. Raises VerifyError when it is no JSON object. `what`: the request, for the
    message."""
    try:
        answer = response.json()
    except (ValueError, RecursionError) as error:
        raise VerifyError(
            f"{what} was answered with something else than JSON ({error}): {response.text[:_SHOWN]}", where=url
        ) from error
    if not isinstance(answer, dict):
        raise VerifyError(f"{what} was answered with JSON that is no object: {response.text[:_SHOWN]}", where=url)
    return answer


def _validate_answer(
    kind: type[Read], answer: dict[str, Any], url: str, what: str, *, cause: str | None = None
) -> Read:
    try:
        return kind.model_validate(answer)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise VerifyError(
            f"the answer to {what} cannot be read: {place}: {first['msg']}: {json.dumps(first['input'])[:_SHOWN]}",
            where=url,
            cause=cause,
        ) from error


_SHORT_SECONDS = 5.0
_NUDGE_PROMPT = (1,)


@dataclass(frozen=True)
class Target:
    """The parts of a running deployment as `verify` reaches them."""

    plan: Plan
    client: httpx.AsyncClient
    engine_key: str = field(repr=False)
    run: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    """Part of every cache_salt: no run of `verify` finds the caches of another."""

    @property
    def proxy_url(self) -> str:
        return self.plan.proxy_url

    @property
    def through_router(self) -> bool:
        """Tell whether the proxy is vllm-router."""
        return self.plan.proxy_kind == "vllm-router"

    @property
    def producers(self) -> tuple[WorkerConfig, ...]:
        """Return the engines that compute prompts: prefill, or every engine of an aggregated deployment."""
        return tuple(w for w in self.plan.proxy.workers if w.role != "decode")

    @property
    def decoders(self) -> tuple[WorkerConfig, ...]:
        return tuple(w for w in self.plan.proxy.workers if w.role == "decode")

    @property
    def reference(self) -> WorkerConfig:
        """Return the instance that is asked alone. It computes prompts anyway, and without kv_transfer_params it is an
        ordinary engine."""
        return self.producers[0]

    @property
    def chunk(self) -> int:
        """Return the tokens of an LMCache chunk; without LMCache its default, so that prompts are of the same kind."""
        return self.plan.chunk_size or 256

    def salt(self, leg: str) -> str:
        return f"{VERIFY_SALT}{self.run}-{leg}"

    def log(self, name: str) -> str:
        """Return where the log of a process is, relative to the run directory."""
        return self.plan.process(name).log

    async def complete(
        self, url: str, prompt: tuple[int, ...], *, salt: str, max_tokens: int, **more: Any
    ) -> Completion:
        """Complete a prompt: greedy, exactly `max_tokens` tokens. Raises VerifyError when it is not answered whole, in
        time, with 200: the end of a text is ignored, so a shorter answer is one that was broken off."""
        body = self.body(prompt, salt=salt, max_tokens=max_tokens, **more)
        answer = read_completion(await self.post(url, "/v1/completions", body), url)
        if len(answer.tokens) != max_tokens or answer.prompt_tokens != len(prompt):
            raise VerifyError(
                f"{answer.prompt_tokens} prompt tokens and {len(answer.tokens)} answer tokens came back "
                f"(finish_reason {answer.finish_reason}), {len(prompt)} and {max_tokens} were asked for",
                where=url,
                cause="it was broken off; or the engines have a smaller max_new_tokens (override-generation-config)",
            )
        return answer

    async def nudge(self, worker: WorkerConfig) -> None:
        """Ask one engine for one token: an idle engine makes no steps, and steps set gauges and release blocks."""
        await self.complete(worker.url, _NUDGE_PROMPT, salt=self.salt("nudge"), max_tokens=1)

    def body(self, prompt: tuple[int, ...], *, salt: str, max_tokens: int, **more: Any) -> dict[str, Any]:
        """Return a completions request. The prompt is token ids, so that its length is known; ignore_eos, so that the
        output's is. No logprobs unless asked for: vLLM compiles a kernel for them at first use (17 s on CPU)."""
        return {
            "model": self.plan.served_name,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": salt,
            "return_token_ids": True,
            **more,
        }

    def headers(self, url: str) -> dict[str, str]:
        """Return the headers of a request. `url`: without a path. Engines want the deployment's key, and so does a
        proxy with API keys. vllm-router adds it itself."""
        if url == self.proxy_url and self.through_router:
            return {}
        return {"Authorization": f"Bearer {self.engine_key}"}

    async def post(self, url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON object that is answered. Raises VerifyError otherwise, or when it takes longer than a canary
        may."""
        seconds = self.plan.canary_seconds
        began = time.monotonic()
        try:
            async with time_limit(seconds):
                response = await self.client.post(url + path, json=body, headers=self.headers(url), timeout=seconds)
        except TimeoutError as error:
            raise VerifyError(f"POST {path} was not answered within {seconds:g} s", where=url) from error
        except httpx.HTTPError as error:
            took = time.monotonic() - began
            raise VerifyError(f"POST {path} failed after {took:.1f} s: {describe(error)}", where=url) from error
        if response.status_code != 200:
            raise VerifyError(f"POST {path} was answered {response.status_code}: {response.text[:300]}", where=url)
        return json_object(response, f"POST {path}", url)

    async def get(self, url: str, path: str) -> httpx.Response | str:
        """Return the answer, or why there is none within a few seconds."""
        try:
            async with time_limit(_SHORT_SECONDS):
                return await self.client.get(url + path, headers=self.headers(url), timeout=_SHORT_SECONDS)
        except (httpx.HTTPError, TimeoutError) as error:
            return describe(error)


def describe(error: Exception) -> str:
    """Describe an exception. One without a text is shown by its name."""
    return str(error) or type(error).__name__


_DONE = "[DONE]"


async def read_stream(target: Target, prompt: tuple[int, ...], leg: str, tokens: int) -> int:
    """Reads a stream to its end and returns its number of chunks."""
    chunks = [chunk async for chunk in _stream(target, prompt, leg, tokens)]
    if len(chunks) < 2 or chunks[-1] != _DONE:
        raise VerifyError(f"a stream of {len(chunks)} chunks ended without {_DONE}", where=target.proxy_url)
    return len(chunks) - 1


async def cancel_after_first_chunk(target: Target, prompt: tuple[int, ...], leg: str, tokens: int) -> bool:
    """Send a prompt and leave after the first chunk of its answer. Returns False when the answer was over already."""
    async with aclosing(_stream(target, prompt, leg, tokens)) as chunks:
        async for chunk in chunks:
            return chunk != _DONE
    return False


async def cancel_before_first_byte(
    target: Target, prompt: tuple[int, ...], leg: str, tokens: int, *, after: float
) -> bool:
    """Send a request that is not streamed, so that no byte comes before the whole answer. Leaves `after` so many
    seconds. False: the engine was faster."""
    body = target.body(prompt, salt=target.salt(leg), max_tokens=tokens)
    try:
        async with time_limit(after):
            response = await target.client.post(
                f"{target.proxy_url}/v1/completions",
                json=body,
                headers=target.headers(target.proxy_url),
                timeout=target.plan.canary_seconds,
            )
    except TimeoutError:
        return True
    except httpx.HTTPError as error:
        raise VerifyError(
            f"a request failed before it was cancelled: {describe(error)}", where=target.proxy_url
        ) from error
    if response.status_code != 200:
        raise VerifyError(
            f"a request was answered {response.status_code} before it was cancelled: {response.text[:300]}",
            where=target.proxy_url,
        )
    return False


async def _stream(target: Target, prompt: tuple[int, ...], leg: str, tokens: int) -> AsyncGenerator[str, None]:
    """Yield the data of each server-sent event. Raises VerifyError for an error, also for one in the middle."""
    body = target.body(prompt, salt=target.salt(leg), max_tokens=tokens, stream=True)
    url, seconds = f"{target.proxy_url}/v1/completions", target.plan.canary_seconds
    try:
        async with (
            time_limit(seconds),
            target.client.stream(
                "POST", url, json=body, headers=target.headers(target.proxy_url), timeout=seconds
            ) as response,
        ):
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                raise VerifyError(f"a stream was answered {response.status_code}: {text[:300]}", where=url)
            async for line in response.aiter_lines():
                if line.startswith('data: {"error"'):
                    raise VerifyError(f"a stream ended with an error: {line[:300]}", where=url)
                if line.startswith("data: "):
                    yield line.removeprefix("data: ")
    except TimeoutError as error:
        raise VerifyError(f"a stream did not end within {seconds:g} s", where=url) from error
    except httpx.HTTPError as error:
        raise VerifyError(f"a stream broke off: {describe(error)}", where=url) from error
