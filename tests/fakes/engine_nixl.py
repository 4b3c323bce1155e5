"""The fake's NIXL: what a prefill keeps under a lease, and how a decode pulls it.

As upstream: the answer of a prefill says where its KV is; the blocks are freed by the decode that has taken the
request in (after its pull, or without one), or by the end of the lease. Freed blocks hold something else: whoever pulls
them all the same gets KV, but wrong KV, and nobody notices.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

from tests.fakes.engine_kv import KvLoadError
from tests.fakes.engine_model import prefill
from tests.fakes.microhttp import Request, Responder, get_json

OTHER_KV = prefill([0]).hex()


class NixlProducer:
    """Prefill's side: the side channel, and the KV that it keeps."""

    def __init__(self, ranks: int, lease: float) -> None:
        self.engine_ids = [f"{uuid.uuid4()}_dp{rank}" for rank in range(ranks)]
        self.port = 0
        self.delivered = 0
        """Freed by a decode."""
        self.expired = 0
        """Freed by the end of the lease."""
        self.late = 0
        """Decodes that came for KV that was freed already."""
        self.changed: Callable[[], None] = lambda: None
        self._lease = lease
        self._kept: dict[str, str] = {}

    @property
    def held(self) -> int:
        return len(self._kept)

    def keep(self, rank: int, kv: str) -> dict[str, Any]:
        """The kv_transfer_params of the answer."""
        request = f"cmpl-{uuid.uuid4().hex}"
        self._keep(request, kv)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[7, 8, 9]],
            "remote_engine_id": self.engine_ids[rank],
            "remote_request_id": request,
            "remote_host": "127.0.0.1",
            "remote_port": self.port,
            "tp_size": 1,
            "remote_num_tokens": 1.0e1,
            "transfer_mode": "pull",
        }

    async def handle(self, request: Request, responder: Responder) -> None:
        """The side channel's requests."""
        kv = self._kept.pop(request.query["request"], None)
        if kv is None:
            self.late += 1
        else:
            self.delivered += 1
        self.changed()
        await responder.send(200, {"kv": OTHER_KV if kv is None else kv})

    def _keep(self, request: str, kv: str) -> None:
        self._kept[request] = kv
        asyncio.get_running_loop().call_later(self._lease, self._expire, request)
        self.changed()

    def _expire(self, request: str) -> None:
        if self._kept.pop(request, None) is not None:
            self.expired += 1
            self.changed()


async def pull(params: dict[str, Any]) -> str:
    """Decode's side: the KV that `params` name; prefill frees it."""
    url = f"http://{params['remote_host']}:{params['remote_port']}/fake/kv"
    try:
        _, body = await get_json(f"{url}?{urlencode({'request': params['remote_request_id']})}")
    except (OSError, asyncio.IncompleteReadError) as error:
        raise KvLoadError(f"side channel unreachable: {error}") from error
    return str(body["kv"])
