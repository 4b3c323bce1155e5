"""The fake's NIXL in push mode, as upstream with the patch nixl-push.

Decode registers at prefill under the id of its request; prefill writes to whoever has registered under the id of one
of its own, whichever comes first. A decode that is aborted withdraws. What nobody registers for is freed by the end of
the lease; who asks for it later is told that there will be none. An unknown engine id is an error at once.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from tests.fakes.engine_kv import KvLoadError
from tests.fakes.microhttp import Request, Responder, get_json


@dataclass
class Write:
    """One request at a prefill: the two sides meet here."""

    kv: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    asked: bool = False


class PushProducer:
    """Prefill's side: the side channel, and the KV that it keeps."""

    def __init__(self, ranks: int, lease: float) -> None:
        self.engine_ids = [f"{uuid.uuid4()}_dp{rank}" for rank in range(ranks)]
        self.port = 0
        self.delivered = self.expired = self.late = 0
        """Written; freed by the end of the lease; asked for after that, or after a withdrawal."""
        self.changed: Callable[[], None] = lambda: None
        self._lease = lease
        self._writes: dict[str, Write] = {}
        self._closed: set[str] = set()

    @property
    def held(self) -> int:
        """Finished prefills whose KV nobody has asked for."""
        return sum(write.kv.done() and not write.asked for write in self._writes.values())

    def keep(self, rank: int, kv: str, request_id: str) -> dict[str, Any]:
        """The kv_transfer_params of the answer."""
        if request_id not in self._closed:
            write = self._writes.setdefault(request_id, Write())
            write.kv.set_result(kv)
            if write.asked:
                self._done(request_id)
            else:
                asyncio.get_running_loop().call_later(self._lease, self._expire, request_id)
        self.changed()
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[7, 8, 9]],
            "remote_engine_id": self.engine_ids[rank],
            "remote_request_id": f"cmpl-{request_id}-0-abcdef01",
            "remote_host": "127.0.0.1",
            "remote_port": self.port,
            "tp_size": 1,
            "pp_size": 1,
            "transfer_mode": "push",
        }

    def aborted(self, request_id: str) -> None:
        """The prompt of a request will not be computed."""
        self._close(request_id)

    async def handle(self, request: Request, responder: Responder) -> None:
        """The side channel's requests."""
        name = request.query["request"]
        if request.query["engine"] not in self.engine_ids:
            await responder.send(404, {"detail": "engine id mismatch"})
        elif request.path == "/fake/withdraw":
            self._close(name)
            await responder.send(200, {})
        elif name in self._closed:
            self.late += 1
            self.changed()
            await responder.send(410, {"detail": "nothing is written for it"})
        else:
            write = self._writes.setdefault(name, Write())
            write.asked = True
            if write.kv.done():
                self._done(name)
            self.changed()
            try:
                await responder.send(200, {"kv": await asyncio.shield(write.kv)})
            except KvLoadError as error:
                await responder.send(410, {"detail": str(error)})

    def _done(self, request_id: str) -> None:
        self._writes.pop(request_id, None)
        self._closed.add(request_id)
        self.delivered += 1

    def _close(self, request_id: str) -> None:
        self._closed.add(request_id)
        write = self._writes.pop(request_id, None)
        if write is not None and not write.kv.done():
            write.kv.set_exception(KvLoadError("nothing is written for it"))
            write.kv.exception()
        self.changed()

    def _expire(self, request_id: str) -> None:
        write = self._writes.get(request_id)
        if write is not None and not write.asked:
            self.expired += 1
            self._close(request_id)


async def written(params: dict[str, Any], request_id: str) -> str:
    """Decode's side: the KV that prefill writes for its request. It withdraws when it is aborted."""
    query = urlencode({"request": request_id, "engine": params["remote_engine_id"]})
    url = f"http://{params['remote_host']}:{params['remote_port']}/fake"
    try:
        status, body = await get_json(f"{url}/kv?{query}")
    except asyncio.CancelledError:
        asyncio.get_running_loop().create_task(_withdraw(f"{url}/withdraw?{query}"))  # ends by itself
        raise
    except (OSError, asyncio.IncompleteReadError) as error:
        # Upstream's decode waits on: its registration ends by its own limit. The proxy leaves before.
        print(f"WARNING side channel: {error}", flush=True)
        await asyncio.Event().wait()
        raise AssertionError("unreachable") from None
    if status != 200:
        raise KvLoadError(body["detail"])
    return str(body["kv"])


async def _withdraw(url: str) -> None:
    try:
        await get_json(url)
    except (OSError, asyncio.IncompleteReadError):
        print("WARNING prefill is gone", flush=True)
