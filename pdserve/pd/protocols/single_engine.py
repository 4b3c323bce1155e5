"""One engine computes the prompt and answers: the aggregated mode, and what cannot or need not be split."""

from __future__ import annotations

from pdserve.pd.http.pieces import Payload
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

    async def attempt(self, request: ClientRequest, client: Client, worker: Worker) -> None:
        """Answers the client. Raises ApiError, ClientGoneError or WorkerFailedError."""
        body = request.dialect.whole_body(request.body)
        await self.send(
            request, client, worker, self._engines.post(worker, request.target, request.headers, body), body
        )

    async def send(self, request: ClientRequest, client: Client, worker: Worker, head: bytes, body: Payload) -> None:
        """The same, with what is sent. `head`: as a Leg takes it."""
        watch = Watch(client, (worker,))
        tokens = request.ask.estimate
        worker.load.add_prompt_tokens(tokens)
        leg = Leg(worker, head, body, watch.poke)
        computing = True
        try:
            await watch.until(lambda: leg.settled)
            leg.result()
            worker.load.add_prompt_tokens(-tokens)
            computing = False
            client.relay(leg)
            try:
                await watch.until(lambda: client.ended)
            except WorkerFailedError as failure:
                raise failure.error from failure
        finally:
            if computing:
                worker.load.add_prompt_tokens(-tokens)
            leg.close()
            watch.end()
