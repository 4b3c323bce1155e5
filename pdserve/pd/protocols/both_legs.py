"""Two legs that are under way at once: until decode's answer begins, and from there to its end."""

from __future__ import annotations

import asyncio
from typing import Final

from pdserve.pd.protocols import prefill_leg
from pdserve.pd.protocols.background import Background, settle
from pdserve.pd.protocols.mooncake_legs import Legs
from pdserve.pd.relay.client import Client
from pdserve.pd.relay.leg import Leg
from pdserve.pd.relay.waiting import EARLY_SECONDS, Watch
from pdserve.pd.workers.failure import WorkerFailedError

ANSWER_SECONDS: Final = 0.5
"""How long prefill's answer may be behind decode's, which cannot begin before its KV is complete."""


async def first_event(legs: Legs, watch: Watch) -> None:
    """Until decode's answer begins, and prefill's is there; a failure of prefill until then ends the wait at once."""
    prefill, decode = legs.prefill, legs.decode
    await watch.until(lambda: decode.settled or (prefill.complete and not prefill_leg.ended_well(prefill)))
    if not decode.settled:
        prefill_leg.check(prefill)
        await watch.until(lambda: decode.settled)
    _unbroken(decode)
    watch.forget(prefill.worker)
    if not prefill.complete:
        # Its cached tokens are wanted; it comes before decode's first token but for a race.
        await _prefill_answered(legs, watch)


async def relay(legs: Legs, client: Client, watch: Watch, background: Background) -> None:
    """Decode's answer, to its end."""
    try:
        client.cached_tokens = prefill_leg.take_cached_tokens(legs.prefill)
        legs.prefill.drop_request()
        if legs.prefill.complete:
            # Decode has its KV: a prefill that is drained need not wait for the rest of the answer.
            legs.prefill.close()
        client.relay(legs.decode)
        if not client.ended:
            await watch.until(lambda: client.ended)
    except WorkerFailedError as failure:
        raise failure.error from failure
    finally:
        legs.decode.close()
        if not legs.prefill.complete:
            background.start(_finish(legs.prefill))


async def _prefill_answered(legs: Legs, watch: Watch) -> None:
    """Waits a moment for that. Nothing of decode's answer has reached the client: should it break now, another may
    still give one."""
    prefill, decode = legs.prefill, legs.decode
    loop = asyncio.get_running_loop()
    late = loop.time() + ANSWER_SECONDS
    timer = loop.call_at(late + EARLY_SECONDS, watch.poke)
    try:
        await watch.until(lambda: prefill.complete or decode.failure is not None or loop.time() >= late)
    finally:
        timer.cancel()
    _unbroken(decode)


async def _finish(leg: Leg) -> None:
    await settle((leg,), lambda: leg.complete)
    leg.close()


def _unbroken(decode: Leg) -> None:
    """WorkerFailedError after a failure. One in the middle of an answer is as good as one before it, while nothing of
    that has reached the client."""
    failure = decode.failure
    if failure is not None:
        retry = failure.retry or decode.answer is not None
        raise WorkerFailedError(decode.worker, failure.error, retry=retry, fault=failure.fault)
