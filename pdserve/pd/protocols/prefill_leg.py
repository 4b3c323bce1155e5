"""A prefill leg as every P/D protocol has it: how it is sent and counted, and what its answer reports."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

from pdserve.pd.errors import ApiError
from pdserve.pd.http.pieces import Payload
from pdserve.pd.relay.leg import Leg, ignore_poke
from pdserve.pd.requests.request import ClientRequest
from pdserve.pd.telemetry.usage_counts import cached_in
from pdserve.pd.workers.engines import Engines
from pdserve.pd.workers.failure import WorkerFailedError
from pdserve.pd.workers.registry import Worker

_BAD_ENDS: Final = ("abort", "error")
_LENGTH: Final = b'"finish_reason":"length'


def send(
    engines: Engines,
    request: ClientRequest,
    prefill: Worker,
    body: Payload,
    *,
    rank_header: bytes,
    poke: Callable[[], None],
    on_complete: Callable[[], None] = ignore_poke,
) -> Leg:
    """Sends it. Its prompt counts as load of the worker until it is complete; then `on_complete` is called too. Once
    the prompt is computed, the request's place in the prefill pool is free."""
    tokens, attempt = request.ask.estimate, request.attempts
    prefill.load.add_prompt_tokens(tokens)

    def complete() -> None:
        prefill.load.add_prompt_tokens(-tokens)
        on_complete()
        # One that ends when another attempt has begun is not about that one.
        if leg.failure is None and request.attempts == attempt:
            request.stages.prefilled = leg.first_byte
            if request.prefill_ticket is not None:
                request.prefill_ticket.release()

    head = engines.post(prefill, request.dialect.path.encode(), request.headers + rank_header, body)
    leg = Leg(prefill, head, body, poke, complete)
    return leg


def ended_well(leg: Leg) -> bool:
    """A complete leg, beyond doubt; `check` returns what is wrong with another, if anything is."""
    return leg.answer is not None and good_end(leg.answer.data)


def check(leg: Leg) -> None:
    """A complete leg must have ended well: WorkerFailedError after an abort, when its KV is gone. A stop is no harm:
    NIXL keeps the KV by itself, Mooncake by the patch mooncake-requests."""
    if ended_well(leg):
        return
    reason = bad_end(leg.result().data)
    if reason is None:
        return
    error = ApiError(502, f"{leg.worker.name} ended the prefill by {reason}: its KV was dropped")
    raise WorkerFailedError(leg.worker, error, retry=True, fault="unavailable")


def good_end(answer: bytes) -> bool:
    """Return whether it is seen at once that a prefill has ended well. The bare word proves nothing: an aborted one may
    have written it as its token."""
    # Without its last quote, which is everywhere in JSON, the text takes a third of the time to find.
    at = answer.find(_LENGTH)
    while at >= 0:
        behind = at + len(_LENGTH)
        if answer[behind : behind + 1] == b'"':
            return True
        at = answer.find(_LENGTH, behind)
    return b'"finish_reason":"stop"' in answer


def bad_end(answer: bytes) -> str | None:
    """Return how a prefill ended that has dropped its KV; None: it has not."""
    try:
        choices = json.loads(answer).get("choices")
        # The other APIs have no reasons that mean trouble: they answer with an error.
        ended = choices[0].get("finish_reason") if choices else None
    except (ValueError, AttributeError, TypeError, LookupError, RecursionError):
        return "an unreadable answer"
    return str(ended) if ended in _BAD_ENDS else None


def take_cached_tokens(leg: Leg) -> int | None:
    """Prompt tokens that prefill did not compute. None when it does not report it. Its answer has nothing else that is
    wanted, and leaves memory."""
    if leg.answer is None or not leg.complete:
        return None
    cached: int | None = cached_in(leg.answer.data)
    leg.answer.data = b""
    return cached
