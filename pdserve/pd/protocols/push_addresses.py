"""Where decode reaches each rank of a prefill over NIXL: from an answer of its own, kept for one of its lives."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

from pdserve.pd.errors import ApiError
from pdserve.pd.protocols.background import settle
from pdserve.pd.random_id import new_id
from pdserve.pd.relay.leg import Leg, never
from pdserve.pd.requests.body import Body, encode
from pdserve.pd.workers.engines import Engines
from pdserve.pd.workers.failure import WorkerFailedError
from pdserve.pd.workers.registry import Worker

LEARN_SECONDS = 60.0
"""How long a prefill may take for one token. It may have a queue."""
_PATH = b"/v1/completions"
ASK = b'{"do_remote_decode":true,"do_remote_prefill":false}'
"""kv_transfer_params of a prefill leg."""
_BODY = b'{"model":%b,"prompt":[1],"max_tokens":1,"stream":false,"ignore_eos":true,"kv_transfer_params":' + ASK + b"}"
_NEEDED = ("remote_engine_id", "remote_host", "remote_port", "tp_size")
_PASSED_ON = (*_NEEDED, "pp_size", "dcp_size")


@dataclass(frozen=True, slots=True)
class Address:
    """Of one rank."""

    for_decode: bytes
    """kv_transfer_params of the decode leg."""
    rank_header: bytes


class PushAddresses:
    """What the prefills have answered."""

    def __init__(self, engines: Engines, served_name: str) -> None:
        self._engines = engines
        self._body = _BODY % encode(served_name)
        self._known: dict[Worker, tuple[int, list[Address]]] = {}
        """By the worker itself: another one may have its name by now."""
        self._asking: dict[Worker, tuple[int, asyncio.Task[None]]] = {}
        self._turns: dict[str, int] = {}

    def next(self, worker: Worker) -> Address | None:
        """The next rank's; None when it is not known for this life."""
        life, addresses = self._known.get(worker, (-1, []))
        if life != worker.life:
            return None
        turn = self._turns[worker.name] = self._turns.get(worker.name, -1) + 1
        return addresses[turn % len(addresses)]

    async def learn(self, worker: Worker) -> None:
        """Asks every rank for one token, whose KV prefill keeps for its lease; once for all that want to know.
        WorkerFailedError when one does not answer as it should."""
        life, asking = self._asking.get(worker, (-1, None))
        if asking is None or life != worker.life:
            asking = asyncio.ensure_future(self._ask_all(worker))
            self._asking[worker] = (worker.life, asking)
            asking.add_done_callback(partial(self._asked, worker))
        # Who waits may leave.
        await asyncio.shield(asking)

    def forget(self, worker: Worker) -> None:
        """It died, or was removed."""
        self._known.pop(worker, None)
        self._turns.pop(worker.name, None)

    async def _ask_all(self, worker: Worker) -> None:
        life, ranks = worker.life, worker.config.ranks
        addresses = [await self._ask(worker, rank, ranks) for rank in range(ranks)]
        if worker.life == life and worker.state != "dead":
            self._known[worker] = (life, addresses)

    def _asked(self, worker: Worker, task: asyncio.Task[None]) -> None:
        if self._asking.get(worker, (-1, None))[1] is task:
            del self._asking[worker]
        if not task.cancelled():
            # Perhaps nobody waits for it any more.
            task.exception()

    async def _ask(self, worker: Worker, rank: int, ranks: int) -> Address:
        rank_header = b"x-data-parallel-rank: %d\r\n" % rank if ranks > 1 else b""
        headers = self._engines.client_headers((), f"address-{new_id()}", ours=True) + rank_header
        leg = Leg(worker, self._engines.post(worker, _PATH, headers, self._body), self._body, never)
        await settle((leg,), lambda: leg.complete, LEARN_SECONDS)
        try:
            if not leg.complete:
                raise _failed(worker, "does not answer one token in time")
            try:
                return Address(for_decode(leg.result().data), rank_header)
            except ValueError as error:
                raise _failed(worker, str(error)) from error
            except WorkerFailedError as failure:
                if failure.error.status >= 500:
                    raise
                # Of our request: no client of a prompt is to blame.
                raise _failed(worker, f"refuses to say where it is: {failure.error.message}") from failure
        finally:
            leg.close()


def for_decode(answer: bytes) -> bytes:
    """The kv_transfer_params of a decode leg, of any answer of its prefill. ValueError: what is wrong with it."""
    try:
        raw = Body(answer).raw_value("kv_transfer_params")
        params = Body(raw) if raw is not None and raw.startswith(b"{") else None
    except ApiError as error:
        raise ValueError("gave an answer that is no JSON object") from error
    values = {} if params is None else {name: params.raw_value(name) for name in _PASSED_ON if name in params}
    missing = [name for name in _NEEDED if values.get(name) in (None, b"null")]
    if missing:
        raise ValueError(f"does not say {', '.join(missing)} in its kv_transfer_params")
    named = b",".join(b'"%b":%b' % (name.encode(), value) for name, value in values.items() if value is not None)
    # Decode puts an id of its own there; upstream must find the key.
    return b'{"do_remote_decode":false,"do_remote_prefill":true,"remote_request_id":"",%b}' % named


def _failed(worker: Worker, what: str) -> WorkerFailedError:
    error = ApiError(502, f"{worker.name} {what}")
    return WorkerFailedError(worker, error, retry=True, fault="unavailable")
