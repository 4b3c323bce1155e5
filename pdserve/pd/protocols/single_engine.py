"""One engine computes the prompt and answers: the aggregated mode, and what cannot or need not be split."""

from __future__ import annotations

from collections.abc import Callable

from pdserve.pd.relay.client import Client
from pdserve.pd.relay.leg import Leg
from pdserve.pd.relay.waiting import Watch
from pdserve.pd.requests.request import ClientRequest
from pdserve.pd.workers.engines import Engines
from pdserve.pd.workers.failure import WorkerFailedError
from pdserve.pd.workers.registry import Worker


class SingleEngine:
    """Sends each request to one worker, as it is."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines

    async def attempt(self, request: ClientRequest, client: Client, worker: Worker, *, bare: bytes = b"") -> None:
        """Answers the client. `bare`: the method of a request without a body; empty: its body is posted. Raises
        ApiError, ClientGoneError or WorkerFailedError."""
        watch = Watch(client, (worker,))
        try:
            leg = self._sent(request, worker, watch.poke, bare)
            watch.legs = (leg,)
            try:
                await self._computed(leg, request.ask.estimate, watch)
                client.relay(leg)
                await watch.until(lambda: client.ended)
            except WorkerFailedError as failure:
                if client.started:
                    raise failure.error from failure
                raise
            finally:
                leg.close()
        finally:
            watch.end()

    async def _computed(self, leg: Leg, tokens: int, watch: Watch) -> None:
        """Its answer has begun. Up to then its prompt counts as load of the worker."""
        load = leg.worker.load
        load.add_prompt_tokens(tokens)
        try:
            await watch.until(lambda: leg.settled)
            leg.result()
        finally:
            load.add_prompt_tokens(-tokens)

    def _sent(self, request: ClientRequest, worker: Worker, poke: Callable[[], None], bare: bytes) -> Leg:
        """A function of its own: the frame of what waits for the answer would keep the body."""
        if bare:
            return Leg(worker, self._engines.bare(worker, bare, request.target, request.headers), b"", poke)
        body = request.dialect.whole_body(request.body)
        return Leg(worker, self._engines.post(worker, request.target, request.headers, body), body, poke)
