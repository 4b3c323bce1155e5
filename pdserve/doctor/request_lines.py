"""The proxy's line for each request, in either of its formats (pd/telemetry/request_log.py)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

_PLAIN = re.compile(r"^\S+Z (?P<outcome>ok|error|cancelled|rejected) (?P<status>\d{3}) \S+ id=")
_FIELD = re.compile(r' (?P<name>prompt_tokens|queue_ms|error)=(?P<value>"(?:[^"\\]|\\.)*"|\S+)')


class _Fields(BaseModel):
    """Of a line in JSON. A number beyond these bounds is of a line that was changed."""

    model_config = ConfigDict(strict=True)

    status: Annotated[int, Field(ge=0, le=999)]
    error: str | None = ""
    prompt_tokens: Annotated[int, Field(ge=0, le=1 << 40)] | None = None
    queue_ms: Annotated[float, Field(ge=0, le=1e15)] | None = None


@dataclass(frozen=True)
class EndedRequest:
    """How a request ended. None: the line does not have it."""

    text: str
    status: int
    error: str = ""
    prompt_tokens: int | None = None
    queue_ms: float | None = None


def requests(lines: Iterable[str]) -> Iterator[EndedRequest]:
    """Of every such line; what is none, or is torn, is left out."""
    for line in lines:
        if (request := _of_json(line) if line.startswith("{") else _of_text(line)) is not None:
            yield request


def _of_text(line: str) -> EndedRequest | None:
    if (match := _PLAIN.match(line)) is None:
        return None
    fields = {each["name"]: each["value"] for each in _FIELD.finditer(line)}
    tokens, queue, error = fields.get("prompt_tokens", ""), fields.get("queue_ms", ""), fields.get("error", "")
    return EndedRequest(
        line,
        int(match["status"]),
        error.strip('"'),
        int(tokens) if re.fullmatch(r"\d{1,12}", tokens) else None,
        float(queue) if re.fullmatch(r"\d{1,15}(?:\.\d{1,20})?", queue) else None,
    )


def _of_json(line: str) -> EndedRequest | None:
    try:
        fields = _Fields.model_validate_json(line)
    except ValidationError:
        return None
    return EndedRequest(line, fields.status, fields.error or "", fields.prompt_tokens, fields.queue_ms)
