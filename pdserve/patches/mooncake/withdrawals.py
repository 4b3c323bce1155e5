"""The withdrawal of pulls: its message on MooncakeConnector's side channel, and the connections of a decode worker.

The message is one frame from a DEALER to the ROUTER of a prefill worker, like a pull, but of a text that no msgpack
decoder accepts: a peer without the patch answers it with status ERROR, as it answers whatever it cannot decode, and
nothing else happens. A peer with it answers FINISH with the requests in ok_reqs, when it is certain that their blocks
are not written any more: not started and never will be, or ended.

There is one connection to each prefill worker. What waits goes out in one message. A connection that broke is made anew
and what was not answered on it is sent again: to withdraw twice is the same as once. It is closed when nothing was
withdrawn for a while. All in the receiver loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pdserve.patches.mooncake import sockets
from pdserve.patches.mooncake.peer import watch

_PREFIX = b"pdserve withdraws "


@dataclass(frozen=True)
class Withdrawal:
    """Withdraws pulls. Decode does not want these any more."""

    transfers: Mapping[str, str]
    """Decode's request id -> transfer id."""

    def encode(self) -> bytes:
        return _PREFIX + json.dumps(dict(self.transfers)).encode()


class SideChannelDecoder:
    """Stands before upstream's decoder of pulls in a prefill worker."""

    def __init__(self, pulls: Any) -> None:
        self._pulls = pulls

    def decode(self, message: bytes) -> Any:
        """Return a Withdrawal, or what upstream makes of the message. Raises ValueError like upstream's decoder."""
        if bytes(message[: len(_PREFIX)]) != _PREFIX:
            return self._pulls.decode(message)
        transfers = json.loads(bytes(message[len(_PREFIX) :]))
        return Withdrawal({str(request): str(transfer) for request, transfer in transfers.items()})


_IDLE_SECONDS = 10.0
"""Less would leave the kernel thousands of closed connections under load."""
_AT_ONCE = 1000
"""Transfers in one message: prefill reads it in its sender loop, between the pulls of others."""
_AGAIN_SECONDS = 1.0
"""Before the next try, where there was no socket."""

log = logging.getLogger("pdserve.patches")


class WithdrawalResult(Enum):
    """The end of a withdrawal."""

    RELEASED = "prefill does not write these and keeps no KV for them"
    REFUSED = "prefill does not take withdrawals"
    GONE = "no process listens there any more"


class Lines:
    """All withdrawals of one decode worker. Owns a task for each prefill worker that has something to do."""

    def __init__(self, worker: Any, patch: str) -> None:
        """Begin without a connection. `patch`: the name under which a lack of sockets is counted."""
        self._worker = worker
        self._patch = patch
        self._lines: dict[str, _Line] = {}

    def withdraw(self, address: str, transfers: Mapping[str, str]) -> asyncio.Future[WithdrawalResult]:
        """Withdraw transfers (request -> transfer id) from the prefill there, whether the caller waits or not."""
        line = self._lines.get(address)
        if line is None:
            line = self._lines[address] = _Line(self._worker, address, self._patch, self._ended)
        return line.withdraw(transfers)

    def _ended(self, address: str) -> None:
        del self._lines[address]


class _Line:
    """The connection to one prefill worker, until it has nothing to do."""

    def __init__(self, worker: Any, address: str, patch: str, ended: Callable[[str], None]) -> None:
        self._worker, self._address, self._patch, self._ended = worker, address, patch, ended
        self._unsent: dict[str, str] = {}
        self._unanswered: dict[str, str] = {}
        self._asking: dict[str, list[_Asked]] = {}
        """By request: the calls that wait for its answer."""
        self._wake = asyncio.Event()
        # A context of its own: the sockets of a pull's context are monitored for that pull.
        self._task = asyncio.get_running_loop().create_task(self._serve(), context=contextvars.Context())

    def withdraw(self, transfers: Mapping[str, str]) -> asyncio.Future[WithdrawalResult]:
        asked = _Asked(set(transfers))
        for request in transfers:
            self._asking.setdefault(request, []).append(asked)
        self._unsent.update(transfers)
        self._wake.set()
        return asked.answer

    async def _serve(self) -> None:
        import zmq

        try:
            while self._asking:
                try:
                    await self._converse()
                except zmq.ContextTerminated:
                    return
                except (zmq.ZMQError, OSError) as error:
                    if sockets.is_exhaustion(error):
                        sockets.count(self._patch, error)
                    else:
                        log.error("withdrawals from %s failed and are tried again: %s", self._address, error)
                    await asyncio.sleep(_AGAIN_SECONDS)
        finally:
            self._ended(self._address)
            for asked in itertools.chain(*self._asking.values()):
                asked.answer.cancel()

    async def _converse(self) -> None:
        import zmq
        from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as upstream

        self._again()
        context, decoder = self._worker.async_zmq_ctx, self._worker._xfer_resp_decoder
        with upstream.make_zmq_socket(context, self._address, zmq.DEALER, bind=False, linger=0) as sock:
            watch(sock, self._address, lost=self._lost, reconnecting=self._again)
            heard = asyncio.ensure_future(sock.recv())
            while True:
                await self._send(sock)
                self._wake.clear()
                woken = asyncio.ensure_future(self._wake.wait())
                await asyncio.wait({heard, woken}, timeout=_IDLE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                woken.cancel()
                if heard.done():
                    self._hear(upstream.MooncakeXferResponseStatus, decoder.decode(heard.result()))
                    heard = asyncio.ensure_future(sock.recv())
                elif not self._asking:
                    heard.cancel()
                    return

    async def _send(self, sock: Any) -> None:
        while self._unsent:
            batch = dict(itertools.islice(self._unsent.items(), _AT_ONCE))
            for request in batch:
                del self._unsent[request]
            self._unanswered |= batch
            await sock.send(Withdrawal(batch).encode())

    def _hear(self, status: Any, response: Any) -> None:
        if response.status == status.ERROR:
            # It names no request: such a peer answers every withdrawal like this.
            log.warning("%s does not take withdrawals: %s", self._address, response.err_msg)
            self._answered(list(self._unanswered), WithdrawalResult.REFUSED)
        else:
            self._answered(response.ok_reqs or (), WithdrawalResult.RELEASED)

    def _lost(self) -> None:
        self._answered([*self._unanswered, *self._unsent], WithdrawalResult.GONE)
        self._unsent.clear()
        self._wake.set()

    def _again(self) -> None:
        """Send again what was not answered: the answers may be lost."""
        self._unsent = self._unanswered | self._unsent
        self._unanswered = {}
        self._wake.set()

    def _answered(self, requests: Collection[str], answer: WithdrawalResult) -> None:
        for request in requests:
            self._unanswered.pop(request, None)
            for asked in self._asking.pop(request, ()):
                asked.settle(request, answer)


class _Asked:
    """Holds one call: it is answered when all of its requests are."""

    def __init__(self, requests: set[str]) -> None:
        self._left = requests
        self.answer: asyncio.Future[WithdrawalResult] = asyncio.get_running_loop().create_future()

    def settle(self, request: str, answer: WithdrawalResult) -> None:
        self._left.discard(request)
        if not self._left and not self.answer.done():
            self.answer.set_result(answer)
