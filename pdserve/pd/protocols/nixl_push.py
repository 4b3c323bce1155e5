"""vLLM's NixlPushConnector: prefill writes the KV of a prompt into decode's memory, and the two meet by the request id.

Both legs are sent at once; either may arrive first. The contract is that of nixl/push_scheduler.py and push_worker.py
in vLLM 0.32 and 0.33, with the patch nixl-push in both engines:

- Both legs carry the same X-Request-Id: prefill finds decode's registration by it. So each attempt has one of its own
  that nobody can foresee, also where a client names its request: with the same id twice, one client's KV would go to
  the other. The Responses API does not take the id of a request from this header: its requests go to one engine.
- Decode gets prefill's engine id, host, port and sizes. The engine id is new in each life of a prefill. All of it is in
  the parameters of any answer of prefill, so that each life is asked once, for one token.
- A decode that is left withdraws its registration, and prefill drops what it keeps for it. One whose scheduler has
  never had the request does not know of it: then prefill keeps its KV for the lease (kv_lease_duration).
- A prefill that has died writes nothing: decode's leg is left at once, and its blocks are given back when the patch
  knows that no WRITE can come.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from pdserve.pd.errors import ApiError, ClientGoneError
from pdserve.pd.protocols import both_legs, chosen_ids, prefill_leg
from pdserve.pd.protocols.background import Background, settle
from pdserve.pd.protocols.mooncake_legs import Legs
from pdserve.pd.protocols.push_addresses import ASK, Address, PushAddresses
from pdserve.pd.random_id import new_id
from pdserve.pd.relay.client import Client
from pdserve.pd.relay.leg import Leg
from pdserve.pd.relay.waiting import Watch
from pdserve.pd.requests.request import ClientRequest
from pdserve.pd.workers.engines import Engines
from pdserve.pd.workers.failure import WorkerFailedError
from pdserve.pd.workers.registry import Registry, Worker

log = logging.getLogger("pdserve.proxy")

UNSPLIT: Final = frozenset({"responses"})
"""Names of APIs whose request ids prefill and decode make up, each its own."""
TAKEN_IN_SECONDS: Final = 1.0
"""How long decode's API server may take to hand a request to its scheduler: one that is aborted earlier is dropped
without a word to prefill."""
REFUSED_SECONDS: Final = 0.25
"""How long prefill may take to answer once decode has failed: what both fail with is explained by prefill."""


class NixlPushProtocol:
    """The protocol object of one proxy."""

    def __init__(self, registry: Registry, engines: Engines, served_name: str) -> None:
        self._engines = engines
        self._addresses = PushAddresses(engines, served_name)
        self.background = Background()
        registry.on_ready(self._learn)
        registry.on_lost(self._addresses.forget)

    async def attempt(self, request: ClientRequest, client: Client, prefill: Worker, decode: Worker) -> None:
        """Answers the client. Raises ApiError, ClientGoneError or WorkerFailedError; what it leaves running ends by
        itself."""
        watch = Watch(client, (prefill, decode))
        try:
            address = self._addresses.next(prefill) or await self._learnt(prefill, watch)
            watch.check()
            began = asyncio.get_running_loop().time()
            legs = self._send(request, address, prefill, decode, watch)
            watch.legs = (legs.prefill, legs.decode)
            failed: WorkerFailedError | None = None
            try:
                await both_legs.first_event(legs, watch)
            except WorkerFailedError as failure:
                failed = failure
            except (ApiError, ClientGoneError, asyncio.CancelledError):
                # The client left, its time is up, or this proxy is ending.
                self.background.start(self._leave(legs, began + TAKEN_IN_SECONDS))
                raise
            if failed is not None:
                try:
                    await self._after_failure(legs, failed)
                    raise failed
                finally:
                    # Its traceback has this frame, and with it the body of the request.
                    failed = None
            request.stages.decoding = legs.decode.first_byte
            await both_legs.relay(legs, client, watch, self.background)
        finally:
            watch.end()

    def _send(self, request: ClientRequest, address: Address, prefill: Worker, decode: Worker, watch: Watch) -> Legs:
        dialect, body = request.dialect, request.body
        name = f"{chosen_ids.without_commas(request.request_id)}.{new_id()}"
        headers = self._engines.renamed(request.headers, name)
        decode_body = dialect.decode_body(body, address.for_decode)
        first = prefill_leg.send(
            self._engines,
            request,
            prefill,
            dialect.prefill_body(body, ASK),
            rank_header=address.rank_header,
            headers=headers,
            poke=watch.poke,
        )
        head = self._engines.post(decode, request.target, headers, decode_body)
        return Legs(first, Leg(decode, head, decode_body, watch.poke))

    async def _learnt(self, prefill: Worker, watch: Watch) -> Address:
        await watch.race(self._addresses.learn(prefill))
        address = self._addresses.next(prefill)
        if address is None:
            raise WorkerFailedError(prefill, ApiError(502, f"{prefill.name} has just restarted"), retry=True)
        return address

    # --- what happens to legs that no request waits for

    async def _after_failure(self, legs: Legs, failure: WorkerFailedError) -> None:
        """Leaves both legs. Raises a better explanation of the failure if there is one."""
        if failure.worker is legs.decode.worker:
            legs.decode.close()
            await settle((legs.prefill,), lambda: legs.prefill.complete, REFUSED_SECONDS)
            if failure.error.status >= 500 and legs.prefill.failure is not None:
                better = legs.prefill.failure
                legs.close()
                raise better
        legs.close()

    async def _leave(self, legs: Legs, until: float) -> None:
        """Decode aborts once its scheduler has the request, and has prefill drop its KV."""
        loop = asyncio.get_running_loop()
        await settle((legs.decode,), lambda: legs.decode.settled, max(0.0, until - loop.time()))
        legs.close()

    def _learn(self, worker: Worker) -> None:
        """Ask a new prefill before its first request does."""
        if worker.config.role == "prefill":
            self.background.start(self._ask_quietly(worker))

    async def _ask_quietly(self, worker: Worker) -> None:
        try:
            await self._addresses.learn(worker)
        except WorkerFailedError as failure:
            log.warning("%s", failure)
