"""vLLM's MooncakeConnector: prefill pushes the KV of a prompt to decode, and the two meet by a transfer_id.

For every attempt a transfer_id is made and both legs are sent at once; either may arrive first. The contract is that
of mooncake_connector.py in vLLM 0.21 to 0.33:

- Decode gets transfer_id, remote_bootstrap_addr and remote_engine_id, always all three: with one missing it waits for
  ever. The engine id is new in each life of a prefill and is read from its bootstrap server.
- A prefill leg whose client has left gets a moment to finish its one token, so that the KV is delivered and then
  dropped by decode. If it takes longer both legs are left at once: the patches mooncake-sends and mooncake-pulls then
  release what both sides hold, which without them would wait for the abort timeout.
- When one leg is refused or fails, the other one is left, and a transfer that prefill may hold is withdrawn: a decode
  is asked for something that it is certain to refuse, in the name of the transfer. vLLM tells prefill that no decode
  will fetch it (notify_kv_transfer_request_rejected, vllm#41269; the patch mooncake-pulls makes that a message without
  a wait). Decode does not do so for what its HTTP layer refuses, such as a list of stop words that is too long.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Final

from pdserve.pd.errors import ApiError, ClientGoneError
from pdserve.pd.http.fetch import FetchError, fetch
from pdserve.pd.http.upstream import Pool
from pdserve.pd.protocols import prefill_leg
from pdserve.pd.protocols.background import Background, settle
from pdserve.pd.random_id import new_id
from pdserve.pd.relay.client import Client
from pdserve.pd.relay.leg import Leg, ignore_poke
from pdserve.pd.relay.waiting import EARLY_SECONDS, Watch
from pdserve.pd.requests.body import encode
from pdserve.pd.requests.request import ClientRequest
from pdserve.pd.workers.engines import Engines
from pdserve.pd.workers.failure import WorkerFailedError
from pdserve.pd.workers.registry import Registry, Worker


class Transfer:
    """A transfer of KV from one rank of a prefill."""

    __slots__ = ("engine_id", "id", "prefill", "rank", "ranks")

    def __init__(self, id_: str, prefill: Worker, rank: str, engine_id: str, ranks: int) -> None:
        """`ranks`: how many that prefill has."""
        self.id = id_
        self.prefill = prefill
        self.rank = rank
        self.engine_id = engine_id
        self.ranks = ranks

    def of_engine(self, engine_id: str) -> Transfer:
        """Return the transfer from another life of that prefill."""
        return Transfer(self.id, self.prefill, self.rank, engine_id, self.ranks)

    def for_prefill(self) -> bytes:
        return _FOR_PREFILL + self.id.encode() + _END

    def for_decode(self) -> bytes:
        return _for_decode(self.prefill.config.bootstrap_url, self.engine_id) + self.id.encode() + _END

    def rank_header(self) -> bytes:
        return b"x-data-parallel-rank: %b\r\n" % self.rank.encode() if self.ranks > 1 else b""


_FOR_PREFILL: Final = b'{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"'
_FOR_DECODE: Final = (
    b'{"do_remote_decode":false,"do_remote_prefill":true,"remote_bootstrap_addr":%b,"remote_engine_id":%b,'
    b'"transfer_id":"'
)
_END: Final = b'"}'


@lru_cache(maxsize=1024)
def _for_decode(bootstrap_url: str | None, engine_id: str) -> bytes:
    """Up to the id; the same few again and again."""
    return _FOR_DECODE % (encode(bootstrap_url), encode(engine_id))


_CONNECT_SECONDS: Final = 5.0


class EngineIds:
    """Remembers what the bootstrap servers have answered."""

    def __init__(self) -> None:
        self._known: dict[Worker, tuple[int, list[tuple[str, str]]]] = {}
        """The ids by the worker itself, and not by its name: another one may have that by now."""
        self._turns: dict[str, int] = {}

    def next(self, worker: Worker) -> Transfer | None:
        """A new transfer from the next rank of a prefill; None when its ids are not known for this life."""
        life, ranks = self._known.get(worker, (-1, []))
        if life != worker.life:
            return None
        turn = self._turns[worker.name] = self._turns.get(worker.name, -1) + 1
        rank, engine_id = ranks[turn % len(ranks)]
        return Transfer("xfer-" + new_id(), worker, rank, engine_id, len(ranks))

    async def learn(self, worker: Worker) -> dict[str, str]:
        """Asks the bootstrap server. WorkerFailedError when it does not answer as it should."""
        life = worker.life
        ranks = await self._query(worker)
        if worker.life == life and worker.state != "dead":
            self._known[worker] = (life, sorted(ranks.items()))
        return ranks

    def forget(self, worker: Worker) -> None:
        """It died, or was removed."""
        self._known.pop(worker, None)
        self._turns.pop(worker.name, None)

    async def _query(self, worker: Worker) -> dict[str, str]:
        pool = Pool(worker.config.bootstrap_url or "", connect_timeout=_CONNECT_SECONDS)
        try:
            answer = await fetch(pool, "GET", "/query")
            ranks = {str(rank): str(entry["engine_id"]) for rank, entry in json.loads(answer.body).items()}
        except FetchError as error:
            raise _failed(worker, "does not answer") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise _failed(worker, "gives no engine ids") from error
        finally:
            pool.close()
        if not ranks:
            raise _failed(worker, "has no engine yet")
        return ranks


def _failed(worker: Worker, what: str) -> WorkerFailedError:
    error = ApiError(502, f"The bootstrap server of {worker.name} {what}")
    return WorkerFailedError(worker, error, retry=True, fault="unavailable")


class Legs:
    """One of a transfer's two requests each."""

    __slots__ = ("decode", "prefill")

    def __init__(self, prefill: Leg, decode: Leg) -> None:
        self.prefill, self.decode = prefill, decode

    def close(self) -> None:
        """Decode first: it notifies prefill that it will not fetch the KV."""
        self.decode.close()
        self.prefill.close()


def send(
    engines: Engines, request: ClientRequest, transfer: Transfer, decode: Worker, poke: Callable[[], None]
) -> Legs:
    """Sends both. The transfer's slot at its prefill is free again when that leg is complete."""
    dialect, body = request.dialect, request.body
    prefill_body = dialect.prefill_body(body, transfer.for_prefill())
    decode_body = dialect.decode_body(body, transfer.for_decode())
    prefill = prefill_leg.send(
        engines,
        request,
        transfer.prefill,
        prefill_body,
        rank_header=transfer.rank_header(),
        poke=poke,
        on_complete=transfer.prefill.slots.give,
    )
    head = engines.post(decode, request.target, request.headers, decode_body)
    return Legs(prefill, Leg(decode, head, decode_body, poke))


log = logging.getLogger("pdserve.proxy")

DELIVER_SECONDS: Final = 1.0
"""How long a prefill may take to finish its token once no client waits for it."""
TAKEN_IN_SECONDS: Final = 1.0
"""How long decode's API server may take to hand a request to its scheduler: one that is aborted earlier is dropped
without a word to prefill."""
REFUSED_SECONDS: Final = 0.25
"""How long prefill may take to answer once decode has failed: most of what one refuses the other refuses too, and then
holds nothing."""
ANSWER_SECONDS: Final = 0.5
"""How long prefill's answer may be behind decode's, which cannot begin before its KV is complete."""
_WITHDRAW_SECONDS: Final = 5.0
"""How long a decode may take to refuse."""
_WITHDRAW_PATH: Final = b"/v1/completions"


class MooncakeProtocol:
    """The protocol object of one proxy."""

    def __init__(self, registry: Registry, engines: Engines, served_name: str) -> None:
        self._registry = registry
        self._served_name = served_name
        self._engines = engines
        self._engine_ids = EngineIds()
        self.background = Background()
        registry.on_ready(self._learn)
        registry.on_lost(self._engine_ids.forget)

    async def attempt(self, request: ClientRequest, client: Client, prefill: Worker, decode: Worker) -> None:
        """Answers the client. Raises ApiError, ClientGoneError or WorkerFailedError; what it leaves running ends by
        itself."""
        watch = Watch(client, (prefill, decode))
        try:
            if not prefill.slots.take():
                await wait_for_slot(prefill, watch)
            sent = False
            try:
                transfer = self._engine_ids.next(prefill) or await self._learnt(prefill, watch)
                watch.check()
                legs = send(self._engines, request, transfer, decode, watch.poke)
                watch.legs = (legs.prefill, legs.decode)
                sent = True
            finally:
                if not sent:
                    prefill.slots.give()
            failed: WorkerFailedError | None = None
            try:
                await _first_event(legs, watch)
            except WorkerFailedError as failure:
                failed = failure
            except (ApiError, ClientGoneError, asyncio.CancelledError):
                # The client left, its time is up, or this proxy is ending.
                self.background.start(self._deliver_and_abort(transfer, legs))
                raise
            if failed is not None:
                try:
                    await self._after_failure(transfer, legs, failed)
                    raise failed
                finally:
                    # Its traceback has this frame, and with it the body of the request.
                    failed = None
            request.stages.decoding = legs.decode.first_byte
            await _relay(legs, client, watch, self.background)
        finally:
            watch.end()

    async def _learnt(self, prefill: Worker, watch: Watch) -> Transfer:
        await watch.race(self._engine_ids.learn(prefill))
        transfer = self._engine_ids.next(prefill)
        if transfer is None:
            raise WorkerFailedError(prefill, ApiError(502, f"{prefill.name} has just restarted"), retry=True)
        return transfer

    # --- what happens to legs that no request waits for

    async def _after_failure(self, transfer: Transfer, legs: Legs, failure: WorkerFailedError) -> None:
        """Leave both legs to the background. Raises a better explanation of the failure if there is one."""
        if failure.worker is not legs.decode.worker:
            # There will be no KV: decode has nothing to wait for.
            legs.close()
        elif failure.error.status < 500 or not legs.decode.reached or failure.worker.state == "dead":
            self.background.start(self._withdraw(transfer, legs))
        else:
            await self._ask_prefill(transfer, legs)

    async def _ask_prefill(self, transfer: Transfer, legs: Legs) -> None:
        """Decode failed. The fault is the prefill's if that failed too, is gone or has another engine id by now."""
        failure = legs.decode.failure
        legs.decode.close()
        if legs.prefill.failure is not None:
            legs.close()
            raise legs.prefill.failure
        try:
            ranks = await self._engine_ids.learn(transfer.prefill)
        except WorkerFailedError:
            legs.close()
            raise
        engine_id = ranks.get(transfer.rank, transfer.engine_id)
        self.background.start(self._withdraw(transfer.of_engine(engine_id), legs))
        if engine_id == transfer.engine_id:
            return
        error = failure.error if failure is not None else ApiError(502, f"{transfer.prefill.name} was restarted")
        raise WorkerFailedError(transfer.prefill, error, retry=True, avoid=False) from failure

    async def _deliver_and_abort(self, transfer: Transfer, legs: Legs) -> None:
        """Let prefill finish its token and decode take the request in, then leave both. A decode that has refused it,
        or has never got it, does not notify prefill."""
        prefill, decode = legs.prefill, legs.decode
        loop = asyncio.get_running_loop()
        taken_in = loop.time() + TAKEN_IN_SECONDS
        await settle(
            (prefill, decode),
            lambda: prefill.failure is not None or (prefill.complete and decode.delivered),
            DELIVER_SECONDS,
        )
        if prefill.failure is None:
            await settle((decode,), lambda: decode.settled, max(0.0, taken_in - loop.time()))
        if prefill.failure is None and (decode.failure is not None or not decode.reached):
            await self._withdraw(transfer, legs)
        legs.close()

    async def _withdraw(self, transfer: Transfer, legs: Legs) -> None:
        """Decode has failed, perhaps without having asked for the KV: prefill is to keep none of it."""
        prefill = legs.prefill
        legs.decode.close()
        await settle((prefill,), lambda: prefill.complete, REFUSED_SECONDS)
        holds = prefill.failure is None
        prefill.close()
        if not holds:
            return
        body = _REFUSED % (encode(self._served_name), transfer.for_decode())
        headers = self._engines.client_headers((), f"withdraw-{transfer.id}", ours=True)
        failure = legs.decode.failure
        broken = legs.decode.worker if failure is None or failure.error.status >= 500 else None
        for decode in sorted(self._registry.ready("decode"), key=lambda worker: (worker is broken, worker.requests)):
            if await self._refuses(decode, headers, body):
                return

    async def _refuses(self, decode: Worker, headers: bytes, body: bytes) -> bool:
        """Return whether that decode has refused what it was asked."""
        leg = Leg(decode, self._engines.post(decode, _WITHDRAW_PATH, headers, body), body, ignore_poke, is_load=False)
        await settle((leg,), lambda: leg.complete, _WITHDRAW_SECONDS)
        refused = leg.failure is not None and leg.failure.error.status < 500
        leg.close()
        return refused

    def _learn(self, worker: Worker) -> None:
        """Ask a new prefill for its engine ids before its first request does."""
        if worker.config.role == "prefill":
            self.background.start(self._query_quietly(worker))

    async def _query_quietly(self, worker: Worker) -> None:
        try:
            await self._engine_ids.learn(worker)
        except WorkerFailedError as failure:
            log.warning("%s", failure)


# Beyond any context: refused before an engine's scheduler sees it. 2**31 - 1 is an integer everywhere.
_REFUSED: Final = b'{"model":%b,"prompt":[1],"max_tokens":2147483647,"kv_transfer_params":%b}'


async def wait_for_slot(prefill: Worker, watch: Watch) -> None:
    """Wait for one of the places for transfers at a prefill, in the order of arrival. It is then taken."""
    slots, poke = prefill.slots, watch.poke
    slots.enqueue(poke)
    try:
        while True:
            await watch.until(lambda: slots.is_next(poke))
            if slots.take_turn():
                return
    finally:
        slots.dequeue(poke)


# --- the two legs: until decode's answer begins, and from there to its end


async def _first_event(legs: Legs, watch: Watch) -> None:
    """Wait until decode's answer begins, and prefill's is there. A failure of prefill until then ends the wait
    at once."""
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


async def _relay(legs: Legs, client: Client, watch: Watch, background: Background) -> None:
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
