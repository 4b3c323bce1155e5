"""The fake's MoRI-IO in READ mode: prefill's answer has the address where a decode reads the KV of a transfer id.

As upstream with the patch moriio-unread-prompts: a prefill keeps KV of what ended by length only, until a decode has
read or released it or `defer_timeout` has passed; a decode that is told of no KV computes the prompt.
"""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlencode

from tests.fakes.engine_kv import KvLoadError
from tests.fakes.engine_nixl import NixlProducer
from tests.fakes.microhttp import get_json


class MoriioProducer(NixlProducer):
    """Prefill's side: what it keeps, it keeps as NIXL's does."""

    def keep_for(self, transfer_id: str, kv: str) -> dict[str, Any]:
        """The kv_transfer_params of the answer (`request_finished`)."""
        self._keep(transfer_id, kv)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[7, 8, 9]],
            "remote_engine_id": f"127.0.0.1:{self.port}",
            "remote_host": "127.0.0.1",
            "remote_handshake_port": self.port,
            "remote_notify_port": self.port,
            "remote_dp_rank": 0,
            "remote_dp_rank_override": True,
            "remote_dp_size": 1,
            "remote_dp_size_local": 1,
            "tp_size": 1.0e0,
            "transfer_id": transfer_id,
        }


async def read(params: dict[str, Any]) -> str:
    """Decode's side: the KV of the transfer; prefill frees it."""
    url = f"http://{params['remote_host']}:{params['remote_handshake_port']}/fake/kv"
    try:
        _, body = await get_json(f"{url}?{urlencode({'request': params['transfer_id']})}")
    except (OSError, asyncio.IncompleteReadError) as error:
        raise KvLoadError(f"handshake failed: {error}") from error
    return str(body["kv"])
