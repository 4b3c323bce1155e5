"""vLLM's NixlConnector: decode pulls the KV of a prompt from prefill, and learns its place from prefill's answer.

Two stages, one after the other. The contract is that of nixl/pull_scheduler.py in vLLM 0.21 to 0.33:

- Prefill is asked to keep the KV (do_remote_decode). Its answer, which must not be a stream, carries
  kv_transfer_params: they go into the decode leg's body byte for byte. A prefill that ends by stop keeps the KV too.
- An answer without them means that nothing is kept: decode computes the prompt, and the answer is as right.
- What is kept is kept for a lease (kv_lease_duration); once decode's scheduler has the request, its heartbeats extend
  it. After the lease the blocks hold other prompts, and a decode that pulls them all the same computes on wrong KV.
  So parameters older than half a lease are never used: the request starts anew at prefill.
- Kept blocks are freed by a decode that has taken the request in, whatever becomes of it there: after the pull, an
  abort, or a refusal. So parameters that no decode has seen are given to one that drops them; those that one has seen
  are never used again, because it may have freed the blocks already.

Unlike Mooncake's, these transfers wait for no slot at prefill.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from pdserve.pd.errors import ApiError, ClientGoneError
from pdserve.pd.protocols import chosen_ids, prefill_leg
from pdserve.pd.protocols.background import Background, settle
from pdserve.pd.relay.client import Client
from pdserve.pd.relay.leg import Leg, ignore_poke
from pdserve.pd.relay.waiting import EARLY_SECONDS, Watch
from pdserve.pd.requests.body import Body
from pdserve.pd.requests.request import ClientRequest
from pdserve.pd.workers.engines import Engines
from pdserve.pd.workers.failure import WorkerFailedError
from pdserve.pd.workers.registry import Registry, Worker

_LATE = 2.0
"""Times the interval: later than this is no jitter."""


class RepeatingTimer:
    """Ticks in the running loop."""

    __slots__ = ("_loop", "_pause", "_seconds", "_ticked")

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._ticked = self._loop.time()
        self._pause = (0.0, 0.0)
        """Begin and end of the last one."""
        self._loop.call_later(seconds, self._tick)

    def earliest(self, read: float) -> float:
        """The first moment at which something that was read at loop time `read` can have arrived."""
        begin, end = self._pause
        if begin <= read <= end + self._seconds:
            return begin
        # After a pause reading may come before the tick that notices it.
        return self._ticked if read - self._ticked > _LATE * self._seconds else read

    def _tick(self) -> None:
        now = self._loop.time()
        if now - self._ticked > _LATE * self._seconds:
            self._pause = (self._ticked, now)
        self._ticked = now
        self._loop.call_later(self._seconds, self._tick)


log = logging.getLogger("pdserve.proxy")

_ASK: Final = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,'
    b'"remote_host":null,"remote_port":null}'
)
_USABLE_SHARE: Final = 0.5
"""Of the lease. The rest is for prefill's answer on its way to us, and for decode to tokenise and take it in."""
LAST_MOMENT_SECONDS: Final = 0.5
"""A prefill whose client has left may finish within this time: its answer has what it keeps, and that is dropped.
Then the leg hangs up and listens on for as long: an answer that was on the wire still arrives. What vLLM has finished
without having sent its answer is released by the patch nixl-abandoned-kv."""
TAKEN_IN_SECONDS: Final = 1.0
"""After this time decode's scheduler has a request that was sent. A stream that is closed earlier may be dropped by
vLLM's HTTP layer without a word to the scheduler, and so to prefill."""


@dataclass(slots=True)
class KeptKv:
    """KV that a prefill keeps for whoever has these parameters."""

    params: bytes
    """kv_transfer_params as prefill wrote them."""
    usable_until: float
    """Loop time."""

    def drop(self) -> None:
        """Decode has taken it in. The parameters name the blocks of the whole prompt, and this lives as long as the
        answer."""
        self.params = b""

    @property
    def usable(self) -> bool:
        return asyncio.get_running_loop().time() < self.usable_until


class NixlProtocol:
    """The protocol object of one proxy."""

    def __init__(self, registry: Registry, engines: Engines, lease_seconds: float) -> None:
        self._registry = registry
        self._engines = engines
        self._loop = asyncio.get_running_loop()
        self._usable_seconds = lease_seconds * _USABLE_SHARE
        self._pulse = RepeatingTimer(min(1.0, lease_seconds / 10))
        self._turns: dict[str, int] = {}
        self._silent: set[str] = set()
        self.background = Background()

    async def attempt(self, request: ClientRequest, client: Client, prefill: Worker, decode: Worker) -> None:
        """Answers the client. Raises ApiError, ClientGoneError or WorkerFailedError; what it leaves running ends by
        itself."""
        self._fit_id(request)
        watch = Watch(client, (prefill, decode))
        try:
            sent = self._loop.time()
            prefill_answer = await self._prefill(request, watch, prefill)
            try:
                kept = self._kept(prefill_answer, sent)
                leg = await self._decode(request, watch, decode, kept, prefill)
            finally:
                # Until decode has its KV, or nobody wants that any more, the request counts at prefill: one that is
                # drained is stopped when nothing does.
                prefill_answer.close()
            watch.forget(prefill)
            request.stages.decoding = leg.first_byte
            cached = prefill_leg.take_cached_tokens(prefill_answer)
            if kept is not None:
                # Without, decode has computed the prompt, and what it reports of its cache is true.
                client.cached_tokens = cached
                kept.drop()
            try:
                client.relay(leg)
                await watch.until(lambda: client.ended)
            except WorkerFailedError as failure:
                raise failure.error from failure
            finally:
                leg.close()
        finally:
            watch.end()

    def _fit_id(self, request: ClientRequest) -> None:
        """Gives the engines an id that a heartbeat can name. ApiError 400 for one of the body that it could not."""
        chosen_ids.check_of_response(request)
        if "," in request.request_id:
            name = chosen_ids.without_commas(request.request_id)
            request.headers = self._engines.renamed(request.headers, name)

    # --- first stage

    async def _prefill(self, request: ClientRequest, watch: Watch, prefill: Worker) -> Leg:
        """The complete leg; it has ended well, and is to be closed."""
        body = request.dialect.prefill_body(request.body, self._asked())
        rank, sent = self._next_rank(prefill), self._loop.time()
        leg = prefill_leg.send(self._engines, request, prefill, body, rank_header=rank, poke=watch.poke)
        watch.legs = (leg,)
        try:
            await watch.until(lambda: leg.complete)
        except (ApiError, ClientGoneError, WorkerFailedError, asyncio.CancelledError):
            if leg.failure is None and prefill.state != "dead":
                self.background.start(self._leave_prefill(request.copy(), leg, sent))
            else:
                leg.close()
            raise
        try:
            prefill_leg.check(leg)
        except WorkerFailedError:
            leg.close()
            raise
        return leg

    def _asked(self) -> bytes:
        """Return what asks a prefill to keep the KV of one prompt."""
        return _ASK

    def _next_rank(self, prefill: Worker) -> bytes:
        ranks = prefill.config.ranks
        if ranks == 1:
            return b""
        turn = self._turns[prefill.name] = self._turns.get(prefill.name, -1) + 1
        return b"x-data-parallel-rank: %d\r\n" % (turn % ranks)

    def _kept(self, leg: Leg, sent: float) -> KeptKv | None:
        """The KV that prefill's answer describes. None: it keeps nothing. `sent`: loop time before the request."""
        try:
            params = Body(leg.result().data).raw_value("kv_transfer_params")
        except ApiError as error:
            message = f"{leg.worker.name} gave an answer that is no JSON object"
            raise WorkerFailedError(leg.worker, ApiError(502, message), retry=True) from error
        if params is None or not params.startswith(b"{") or not params[1:-1].strip():
            if leg.worker.name not in self._silent:
                self._silent.add(leg.worker.name)
                log.warning("%s keeps no KV of a prompt: decode computes it (logged once)", leg.worker.name)
            return None
        answered = max(sent, self._pulse.earliest(leg.first_byte))
        return KeptKv(params, answered + self._usable_seconds)

    # --- second stage

    async def _decode(
        self, request: ClientRequest, watch: Watch, decode: Worker, kept: KeptKv | None, prefill: Worker
    ) -> Leg:
        """The leg as soon as its answer begins."""
        try:
            watch.check()
            if kept is not None and not kept.usable:
                error = ApiError(503, f"what {prefill.name} has computed was kept too long", retry_after=1)
                raise WorkerFailedError(prefill, error, retry=True, avoid=False)
        except (ApiError, ClientGoneError, WorkerFailedError):
            self._drop(request, kept, avoid=())
            raise
        dialect, body = request.dialect, request.body
        sent = dialect.whole_body(body) if kept is None else dialect.decode_body(body, kept.params)
        usable_until = math.inf if kept is None else kept.usable_until
        head = self._engines.post(decode, request.target, request.headers, sent)
        leg = Leg(decode, head, sent, watch.poke, usable_until=usable_until)
        watch.legs = (leg,)
        began = self._loop.time()
        try:
            if kept is not None and not leg.delivered:
                await self._delivered(leg, watch, kept)
            await watch.until(lambda: leg.settled)
            leg.result()
        except WorkerFailedError as failure:
            leg.close()
            if not leg.reached and failure.worker is decode:
                self._drop(request, kept, avoid={decode} if failure.avoid else ())
            raise
        except (ApiError, ClientGoneError, asyncio.CancelledError):
            # The client left, its time is up, or this proxy is ending.
            self.background.start(self._leave_decode(request.copy(), leg, kept, began + TAKEN_IN_SECONDS))
            raise
        return leg

    async def _delivered(self, leg: Leg, watch: Watch, kept: KeptKv) -> None:
        """Decode has the request, or will never get it: not after what it names may be gone."""
        leg.poke_on_reached = True
        # Timers count milliseconds and may come early: then nothing would look again.
        timer = self._loop.call_at(kept.usable_until + EARLY_SECONDS, watch.poke)
        try:
            await watch.until(lambda: leg.delivered or not kept.usable)
        finally:
            timer.cancel()
        if not leg.delivered or not kept.usable:
            error = ApiError(502, f"{leg.worker.name} cannot be reached in time")
            raise WorkerFailedError(leg.worker, error, retry=True)

    # --- what happens to legs and blocks that no request waits for

    async def _leave_prefill(self, request: ClientRequest, leg: Leg, sent: float) -> None:
        await settle((leg,), lambda: leg.complete, LAST_MOMENT_SECONDS)
        if not leg.complete:
            leg.hang_up()
            await settle((leg,), lambda: leg.complete, LAST_MOMENT_SECONDS)
        answered = leg.answer is not None and leg.answer.complete
        leg.close()
        if answered:
            try:
                kept = self._kept(leg, sent)
            except WorkerFailedError as failure:
                log.warning("%s: %s", request.request_id, failure)
            else:
                await self._dropped(request, kept, ())

    async def _leave_decode(self, request: ClientRequest, leg: Leg, kept: KeptKv | None, until: float) -> None:
        """Abort there once the scheduler has it; that frees prefill's blocks."""
        await settle((leg,), lambda: leg.settled, max(0.0, until - self._loop.time()))
        leg.close()
        if not leg.reached:
            await self._dropped(request, kept, {leg.worker})

    def _drop(self, request: ClientRequest, kept: KeptKv | None, avoid: Collection[Worker]) -> None:
        if kept is not None:
            self.background.start(self._dropped(request.copy(), kept, avoid))

    async def _dropped(self, request: ClientRequest, kept: KeptKv | None, avoid: Collection[Worker]) -> None:
        """No decode has seen these parameters. Have one take them in for a single token, or for an abort when it is
        busy. Without any, the lease frees the blocks."""
        for decode in sorted(self._registry.ready("decode", avoid), key=lambda worker: worker.requests):
            if kept is None or not kept.usable:
                return
            body = request.dialect.prefill_body(request.body, kept.params)
            head = self._engines.post(decode, request.dialect.path.encode(), request.headers, body)
            leg = Leg(decode, head, body, ignore_poke, usable_until=kept.usable_until, is_load=False)
            if await self._taken_in(leg):
                return

    async def _taken_in(self, leg: Leg) -> bool:
        await settle((leg,), lambda: leg.complete, TAKEN_IN_SECONDS)
        leg.close()
        return leg.reached
