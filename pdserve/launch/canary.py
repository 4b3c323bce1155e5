"""One token through the proxy, from one engine, or through one pair of prefill and decode: the last proof before a
deployment is ready, or an engine is routed to again."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from pdserve.launch.bad_peers import Outcome
from pdserve.launch.fleet import Fleet
from pdserve.plan.process import HttpProbe
from pdserve.reach.protocol import Answered, AskNode

if TYPE_CHECKING:
    from pdserve.observe.metrics import EngineSnapshot

_RETRY_SECONDS = 0.2
_ASK_SECONDS = 3.0
_PROMPT = "pdserve canary"
_IDLE_SECONDS = 4.5
"""In which an idle pair should answer: what is later is in the history, and asked once more before it is judged."""
_AGAIN_SECONDS = 30.0
_DEATH_SECONDS = 0.5
_COUNT_SECONDS = 2.0
"""Engines count a little after they answer."""
_NEW_SECONDS = 3.0
"""By which the proxy hears of a new worker, or is back itself."""
_FEWEST_TOKENS = 259
"""Enough that what a busy decode computes for others meanwhile, a token of each of their prompts, is less."""
_LATE = 504


@dataclass(frozen=True)
class Canary:
    """Holds the outcome of a canary. `text`: the last answer, for people."""

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


class PairCanaries:
    """Sends canaries through the proxy of a fleet, and writes into its history what each has shown."""

    def __init__(self, fleet: Fleet, *, engine_key: str) -> None:
        self._fleet, self._key = fleet, engine_key

    async def cross(self, prefill: str, decode: str, *, new: str, seconds: float) -> Outcome:
        """Send KV through two workers of the proxy, of which `new` is not routed to, within so many seconds. A first
        try that fails is followed by a second one."""
        until = time.monotonic() + seconds
        outcome: Outcome = "unknown"
        for patience in (_IDLE_SECONDS, _AGAIN_SECONDS):
            began = time.monotonic()
            outcome, text = await self._cross(prefill, decode, new=new, patience=patience, until=until)
            ok = {"crossed": True, "failed": False, "unknown": None}[outcome]
            peer, took = (decode if new == prefill else prefill), round(time.monotonic() - began, 3)
            self._fleet.record("canary", name=new, peer=peer, ok=ok, seconds=took, text=text)
            if outcome != "failed":
                break
        return outcome

    async def _cross(
        self, prefill: str, decode: str, *, new: str, patience: float, until: float
    ) -> tuple[Outcome, str]:
        """Send a prompt across a pair and tell what became of it. `patience`: seconds that an idle pair gets; a busy
        one gets all that are left. `new`: which of the two has just been started. `until`: when the time is over."""
        left = min(until - time.monotonic(), self._fleet.plan.proxy.request_timeout_seconds)
        if left < _RETRY_SECONDS:
            return "unknown", "no time was left for it"
        peer, proxy = decode if new == prefill else prefill, self._fleet.on_node_of("proxy")
        running = await _in_flight(proxy, self._fleet.plan.proxy_url, key=self._key)
        idle = running is not None and not running.get(peer)
        before = await self._read_counters(decode)
        tokens = 1 + max(_FEWEST_TOKENS, 2 * (before.block_size or 0))
        status, text = await self._send_pair(prefill, decode, tokens, min(patience, left) if idle else left)
        if status == _LATE:
            return "failed" if idle else "unknown", text
        if status is None or 400 <= status < 500:
            return "unknown", text
        if status != 200:
            # Who has died is not to blame for more than that, which the launcher hears in a moment.
            await asyncio.sleep(_DEATH_SECONDS)
            return "failed", text
        received = await self._has_received(decode, before, tokens)
        if received is None:
            return "crossed", "one token; what it was computed from was not counted"
        if received:
            return "crossed", f"one token, after KV of {tokens} tokens"
        return "failed", f"one token, but {decode} computed the prompt itself: it received no KV"

    async def _send_pair(self, prefill: str, decode: str, tokens: int, seconds: float) -> tuple[int | None, str]:
        """Ask the proxy for a canary, and return the answer's status and text. None: the proxy did not answer at
        all."""
        asked = {"prefill": prefill, "decode": decode, "tokens": tokens, "seconds": f"{seconds:.3f}"}
        url = f"{self._fleet.plan.proxy_url}/canary?{urlencode(asked)}"
        patient_until = time.monotonic() + _NEW_SECONDS
        while True:
            proxy = self._fleet.on_node_of("proxy")
            answer = await proxy("POST", url, headers=_bearer(self._key), seconds=seconds + _ASK_SECONDS)
            text = answer.error if answer.status is None else f"{answer.status} {answer.body[:300]}"
            unheard = answer.refused or answer.status == 404
            if not unheard or time.monotonic() >= patient_until:
                return answer.status, text
            await asyncio.sleep(_RETRY_SECONDS)

    async def _has_received(self, decode: str, before: EngineSnapshot, tokens: int) -> bool | None:
        """Ask decode's counters whether it received the KV of such a prompt since then. Others count too where it
        serves already: it computes one token of each of their prompts, and None is the answer where that could be
        it."""
        last: bool | None = None
        until = time.monotonic() + _COUNT_SECONDS
        while True:
            await asyncio.sleep(_RETRY_SECONDS)
            after = await self._read_counters(decode)
            if before.prompt_tokens is None or after.prompt_tokens is None:
                return None
            grown = {source: count - before.prompt_tokens[source] for source, count in after.prompt_tokens.items()}
            got, computed = grown["external_kv_transfer"] * 2 >= tokens, grown["local_compute"] * 2 >= tokens
            if got and not computed:
                return True
            last = None if got or not computed else False
            if time.monotonic() >= until:
                return last

    async def _read_counters(self, worker: str) -> EngineSnapshot:
        # With httpx, which a launcher needs only where an engine is started anew.
        from pdserve.observe.metrics import engine_figures, samples_of

        probe = self._fleet.plan.process(worker).probe
        assert isinstance(probe, HttpProbe)
        url = f"http://{probe.host}:{probe.port}"
        answer = await self._fleet.on_node_of(worker)("GET", f"{url}/metrics", seconds=_ASK_SECONDS)
        if answer.status != 200:
            return engine_figures(url, answer.error or f"HTTP {answer.status}")
        try:
            return engine_figures(url, await asyncio.to_thread(samples_of, answer.body))
        except ValueError as error:
            return engine_figures(url, f"unreadable answer: {error}")


async def until_idle(ask: AskNode, proxy_url: str, worker: str, *, key: str) -> None:
    """Wait until the proxy has no request in flight on a worker that it was told to drain, or cannot be asked. Requests
    in processes that a rolling restart has replaced are waited for too, though the proxy does not count them for the
    worker. The caller sets the limit of time."""
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


async def _in_flight(ask: AskNode, proxy_url: str, *, key: str) -> dict[str, int] | None:
    """Return the requests that the proxy has in flight, by worker. None: it cannot be asked."""
    answer = await ask("GET", f"{proxy_url}/workers", headers=_bearer(key), seconds=_ASK_SECONDS)
    try:
        return {entry["name"]: entry["in_flight"] for entry in _object(answer)["workers"]}
    except (KeyError, TypeError):
        return None


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def _object(answer: Answered) -> dict[str, Any]:
    """Return the JSON object of an answer; an empty one if it has none."""
    try:
        parsed = json.loads(answer.body)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
