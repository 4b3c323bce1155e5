"""vLLM's MooncakeConnector: prefill pushes the KV of a prompt to decode, and the two meet by a transfer_id.

For every prompt one transfer_id is made and both legs are sent at once; either may arrive first. The contract is
that of mooncake_connector.py in vLLM 0.21 to 0.33:

- Decode gets transfer_id, remote_bootstrap_addr and remote_engine_id, always all three: with one missing it waits for
  ever. The engine id is new in each life of a prefill and is read from its bootstrap server.
- Prefill must end by length, or it drops the KV and decode waits for its whole timeout.
- A prefill leg whose decode leg was sent is never aborted: decode would wait for KV that cannot come. Its one token
  finishes, the KV is delivered, and then decode is aborted.
- KV that certainly no decode has asked for is delivered to one that drops it, so that prefill frees its blocks now
  and not at its abort timeout.

An attempt that fails before the first byte because of a worker is made once more with other workers, or with a fresh
engine id when the old one was stale: a new transfer_id and both legs anew.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import httpx

from pdserve.pd.errors import ApiError, ClientGoneError, WorkerFailedError
from pdserve.pd.registry import Registry, Worker
from pdserve.pd.relay import Answer, Client, Leg, Upstream
from pdserve.pd.requests import Body, ClientRequest, decode_body, encode, prefill_body
from pdserve.pd.waiting import Watch

log = logging.getLogger("pdserve.proxy")

ATTEMPTS = 2
NOT_BY_LENGTH = ("stop", "abort", "error", "repetition")
UNREADABLE = "an unreadable answer"
RANK_HEADER = "x-data-parallel-rank"


@dataclass(frozen=True)
class Transfer:
    """One hand-over of KV from a rank of a prefill."""

    id: str
    prefill: Worker
    rank: str
    engine_id: str
    ranks: int

    def for_prefill(self) -> Body:
        return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": self.id}

    def for_decode(self) -> Body:
        return {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": self.id,
            "remote_bootstrap_addr": self.prefill.config.bootstrap_url,
            "remote_engine_id": self.engine_id,
        }

    def rank_header(self) -> dict[str, str]:
        return {RANK_HEADER: self.rank} if self.ranks > 1 else {}


class EngineIds:
    """rank -> engine id of each prefill, from its bootstrap server; kept for one life of the worker."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._known: dict[str, tuple[int, dict[str, str]]] = {}
        self._turn = 0

    async def ranks(self, worker: Worker, *, fresh: bool = False) -> dict[str, str]:
        """WorkerFailedError when the bootstrap server does not answer as it should."""
        life, known = self._known.get(worker.name, (-1, {}))
        if fresh or life != worker.life:
            life = worker.life
            known = await self._query(worker)
            self._known[worker.name] = (life, known)
        return known

    async def transfer(self, worker: Worker) -> Transfer:
        """A new transfer from the next rank of a prefill."""
        ranks = sorted((await self.ranks(worker)).items())
        self._turn += 1
        rank, engine_id = ranks[self._turn % len(ranks)]
        return Transfer(f"xfer-{uuid.uuid4().hex}", worker, rank, engine_id, len(ranks))

    async def _query(self, worker: Worker) -> dict[str, str]:
        try:
            response = await self._upstream.get(f"{worker.config.bootstrap_url}/query", key=False)
            ranks = {str(rank): str(entry["engine_id"]) for rank, entry in response.json().items()}
        except httpx.HTTPError as error:
            raise self._failed(worker, "does not answer") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise self._failed(worker, "gives no engine ids") from error
        if not ranks:
            raise self._failed(worker, "has no engine yet")
        return ranks

    @staticmethod
    def _failed(worker: Worker, what: str) -> WorkerFailedError:
        return WorkerFailedError(worker, ApiError(502, f"The bootstrap server of {worker.name} {what}"), retry=True)


@dataclass(frozen=True)
class Legs:
    """The two requests of one attempt."""

    prefill: Leg
    decode: Leg


class Mooncake:
    """The protocol object of one proxy."""

    def __init__(self, registry: Registry, upstream: Upstream) -> None:
        self._registry = registry
        self._upstream = upstream
        self._engine_ids = EngineIds(upstream)
        self._background: set[asyncio.Task[None]] = set()
        registry.on_ready(self._learn)

    async def serve(self, request: ClientRequest, client: Client) -> None:
        """Answer one client. Raises ApiError or ClientGoneError; what it leaves running it finishes by itself."""
        avoid: set[Worker] = set()
        for attempt in range(1, ATTEMPTS + 1):
            prefill, decode = self._registry.pick_pair(avoid)
            try:
                await self._attempt(request, client, prefill, decode)
            except WorkerFailedError as failure:
                if failure.avoid:
                    avoid.add(failure.worker)
                others = all(self._registry.ready(role, avoid) for role in self._registry.roles)
                if attempt == ATTEMPTS or client.started or not failure.retry or not others:
                    raise failure.error from failure
                log.warning("%s: %s; once more", client.request_id, failure)
            else:
                return

    async def drained(self) -> None:
        """Returns when nothing is running in the background."""
        while self._background:
            await asyncio.wait(self._background)

    # --- one attempt

    async def _attempt(self, request: ClientRequest, client: Client, prefill: Worker, decode: Worker) -> None:
        watch = Watch(client, (prefill, decode))
        await watch.race(prefill.slots.acquire())
        with ExitStack() as unless_sent:
            unless_sent.callback(prefill.slots.release)
            transfer = await watch.race(self._engine_ids.transfer(prefill))
            legs = self._send(request, transfer, decode)
            unless_sent.pop_all()
        legs.prefill.answer.add_done_callback(lambda _: prefill.slots.release())
        try:
            answer = await self._first_event(legs, watch)
        except WorkerFailedError as failure:
            await self._after_failure(request, transfer, legs, failure)
            raise
        except (ApiError, ClientGoneError, asyncio.CancelledError):
            self._in_background(self._deliver_and_abort(legs))
            raise
        watch.forget(prefill)
        try:
            await watch.race(client.relay(answer, decode))
        except WorkerFailedError as failure:
            raise failure.error from failure
        finally:
            await legs.decode.close()
            self._in_background(self._finish(legs.prefill))

    def _send(self, request: ClientRequest, transfer: Transfer, decode: Worker) -> Legs:
        prefill_leg = encode(prefill_body(request.body, transfer.for_prefill()))
        decode_leg = encode(decode_body(request.body, transfer.for_decode()))
        headers = request.headers
        return Legs(
            Leg(self._upstream, transfer.prefill, request.path, prefill_leg, {**headers, **transfer.rank_header()}),
            Leg(self._upstream, decode, request.path, decode_leg, headers),
        )

    async def _first_event(self, legs: Legs, watch: Watch) -> Answer:
        """Decode's answer as soon as it begins; a failure of prefill until then ends the wait at once."""
        await watch.first(legs.prefill.answer, legs.decode.answer)
        if not legs.decode.answer.done():
            self._check_prefill(legs.prefill)
            await watch.first(legs.decode.answer)
        return legs.decode.answer.result()

    @staticmethod
    def _check_prefill(leg: Leg) -> None:
        """A prefill leg that is done must have ended by length: after a stop token its KV is gone."""
        answer = leg.answer.result()
        try:
            reason = json.loads(answer.head)["choices"][0]["finish_reason"]
        except (ValueError, TypeError, KeyError, IndexError):
            reason = UNREADABLE
        if reason in (*NOT_BY_LENGTH, UNREADABLE):
            error = ApiError(502, f"{leg.worker.name} ended the prefill by {reason}: its KV was dropped")
            raise WorkerFailedError(leg.worker, error, retry=False)

    # --- what happens to legs that nobody waits for

    async def _after_failure(
        self, request: ClientRequest, transfer: Transfer, legs: Legs, failure: WorkerFailedError
    ) -> None:
        """Leave both legs to the background. Raises a better explanation of the failure if there is one."""
        if failure.worker is not legs.decode.worker:
            # There will be no KV: decode has nothing to wait for.
            self._in_background(self._close(legs))
        elif not legs.decode.reached:
            self._in_background(self._release(request, transfer, legs))
        elif failure.retry or failure.error.status < 500:
            self._in_background(self._deliver_and_abort(legs))
        else:
            await self._ask_prefill(request, transfer, legs, failure)

    async def _ask_prefill(
        self, request: ClientRequest, transfer: Transfer, legs: Legs, failure: WorkerFailedError
    ) -> None:
        """Decode answered with a 5xx. The fault is the prefill's if that is gone or has another engine id by now."""
        try:
            ranks = await self._engine_ids.ranks(transfer.prefill, fresh=True)
        except WorkerFailedError:
            self._in_background(self._deliver_and_abort(legs))
            raise
        engine_id = ranks.get(transfer.rank, transfer.engine_id)
        if engine_id == transfer.engine_id:
            self._in_background(self._deliver_and_abort(legs))
            return
        self._in_background(self._release(request, replace(transfer, engine_id=engine_id), legs))
        raise WorkerFailedError(transfer.prefill, failure.error, retry=True, avoid=False) from failure

    async def _deliver_and_abort(self, legs: Legs) -> None:
        """Let prefill finish its token and decode receive the request, then leave decode."""
        await asyncio.wait({legs.prefill.answer})
        if not legs.prefill.answer.exception():
            await legs.decode.sent.wait()
        await self._close(legs)

    async def _release(self, request: ClientRequest, transfer: Transfer, legs: Legs) -> None:
        """No decode has asked for this KV. Have one fetch and drop it."""
        await legs.decode.close()
        await asyncio.wait({legs.prefill.answer})
        prefilled = legs.prefill.answer.exception() is None
        await legs.prefill.close()
        decodes = self._registry.ready("decode", () if legs.decode.reached else {legs.decode.worker})
        if not prefilled or not decodes:
            return
        body = encode(prefill_body(request.body, transfer.for_decode()))
        leg = Leg(self._upstream, decodes[0], request.path, body, request.headers)
        await asyncio.wait({leg.answer})
        await leg.close()

    async def _finish(self, leg: Leg) -> None:
        await asyncio.wait({leg.answer})
        await leg.close()

    async def _close(self, legs: Legs) -> None:
        await legs.decode.close()
        await legs.prefill.close()

    def _learn(self, worker: Worker) -> None:
        """Ask a new prefill for its engine ids before its first request does."""
        if worker.config.role == "prefill":
            self._in_background(self._query_quietly(worker))

    async def _query_quietly(self, worker: Worker) -> None:
        try:
            await self._engine_ids.ranks(worker)
        except WorkerFailedError as failure:
            log.warning("%s", failure)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
