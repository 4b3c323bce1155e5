"""Answers of engines and of the proxy, read strictly: what is odd is an error with the URL, never a number."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import httpx
from pydantic import BaseModel, Field, StrictInt, ValidationError

from pdserve.errors import VerifyError

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
    """One answer of /v1/completions."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of the tokens; empty when not asked for."""
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
    """Raises VerifyError."""
    read = _read(_Answer, answer, url, "a completion", cause=_CAUSE)
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
    """Of /tokenize; at least one. Raises VerifyError."""
    return _read(_Tokens, answer, url, "/tokenize").tokens


def read_max_model_len(answer: dict[str, Any], url: str) -> int | None:
    """Of /v1/models; None: it has no limit there. Raises VerifyError."""
    cards = _read(_Models, answer, url, "/v1/models").data
    return cards[0].max_model_len if cards else None


def json_object(response: httpx.Response, what: str, url: str) -> dict[str, Any]:
    """The body. Raises VerifyError when it is something else. `what`: the request, for the message."""
    try:
        answer = response.json()
    except (ValueError, RecursionError) as error:
        raise VerifyError(
            f"{what} was answered with something else than JSON ({error}): {response.text[:_SHOWN]}", where=url
        ) from error
    if not isinstance(answer, dict):
        raise VerifyError(f"{what} was answered with JSON that is no object: {response.text[:_SHOWN]}", where=url)
    return answer


def _read(kind: type[Read], answer: dict[str, Any], url: str, what: str, *, cause: str | None = None) -> Read:
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
