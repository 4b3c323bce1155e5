"""One token through the proxy, or from one engine: the last proof before a deployment is ready."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

from pdserve.reach.protocol import Answered, AskNode

_RETRY_SECONDS = 0.2
_ASK_SECONDS = 3.0
_PROMPT = "pdserve canary"


@dataclass(frozen=True)
class Canary:
    """`text`: the last answer, for people."""

    ok: bool
    seconds: float
    text: str


async def one_token(ask: AskNode, url: str, model: str, *, seconds: float, key: str | None = None) -> Canary:
    """Asks for one token until it comes or the time is over. 503 and refused connections are tried again."""
    began = time.monotonic()
    text = "no answer"
    headers = {} if key is None else _bearer(key)
    body = json.dumps({"model": model, "prompt": _PROMPT, "max_tokens": 1, "temperature": 0})
    while (left := seconds - (time.monotonic() - began)) > 0:
        answer = await ask("POST", f"{url}/v1/completions", headers=headers, body=body, seconds=left)
        text = answer.error if answer.status is None else f"{answer.status} {answer.body[:300]}"
        if answer.status == 200 and _object(answer).get("choices"):
            return Canary(True, time.monotonic() - began, "one token")
        if not (answer.refused or answer.status == 503):
            break
        await asyncio.sleep(_RETRY_SECONDS)
    return Canary(False, time.monotonic() - began, text)


async def until_idle(ask: AskNode, proxy_url: str, worker: str, *, key: str) -> None:
    """Returns once the proxy has no request in flight on a worker that it was told to drain, or cannot be asked. What
    processes of it have begun that a rolling restart has replaced is not counted: they are waited for. Bounded by the
    caller."""
    while True:
        answer = await ask("GET", f"{proxy_url}/workers", headers=_bearer(key), seconds=_ASK_SECONDS)
        try:
            page = _object(answer)
            entries = [entry for entry in page["workers"] if entry["name"] == worker]
            busy = any(entry["in_flight"] or entry["state"] == "ready" for entry in entries)
        except (KeyError, TypeError):
            return
        if not busy and not page.get("retiring"):
            return
        await asyncio.sleep(_RETRY_SECONDS)


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def _object(answer: Answered) -> dict[str, Any]:
    """The JSON object of an answer; an empty one if it has none."""
    try:
        parsed = json.loads(answer.body)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
