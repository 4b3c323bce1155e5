"""The fake's KV transfers: what a prefill keeps for which request, and how a decode gets it, with each connector.

Each as upstream with pdserve's patches. Mooncake: a prefill keeps KV of requests that carried a transfer_id until it is
fetched or the abort timeout passes; either leg may come first; an unknown engine id is an error at once. NIXL: the
answer of a prefill says where its KV is; a decode frees it, or the end of the lease. Freed blocks hold something else:
whoever pulls them all the same gets wrong KV, and nobody notices. MoRI-IO in READ mode: the same with the address of a
handshake, of what ended by length only; a decode that is told of no KV computes the prompt.
"""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from tests.fakes.engine_model import prefill
from tests.fakes.microhttp import Request, Responder, get_json

ABORT_SECONDS = float(os.environ.get("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", "480"))


_CACHES = ("MooncakeStoreConnector", "OffloadingConnector")


class KvLoadError(Exception):
    """Decode could not get the KV that its request named."""


@dataclass
class Connectors:
    """The connectors that --kv-transfer-config names."""

    role: str = "none"
    mooncake: bool = False
    nixl: bool = False
    moriio: bool = False
    lease: float = 30
    """NIXL: how long prefill keeps KV that nobody pulls."""
    external: bool = False
    """A child that caches: prompts survive a reset of the engine's own prefix cache."""
    store: bool = False
    """That child is a Mooncake store, whose keys the engine counts."""

    @property
    def moves(self) -> bool:
        """Return True if KV comes from prefill."""
        return self.mooncake or self.nixl or self.moriio

    @classmethod
    def parse(cls, config: str | None) -> Connectors:
        if not config:
            return cls()
        top = json.loads(config)
        children = top.get("kv_connector_extra_config", {}).get("connectors", [top])
        by_name = {child["kv_connector"]: child for child in children}
        mooncake, nixl = by_name.get("MooncakeConnector"), by_name.get("NixlConnector")
        moriio = by_name.get("MoRIIOConnector")
        transfer = mooncake or nixl or moriio or {}
        return cls(
            role=transfer.get("kv_role", "none"),
            mooncake=mooncake is not None,
            nixl=nixl is not None,
            moriio=moriio is not None,
            lease=transfer.get("kv_connector_extra_config", {}).get("kv_lease_duration", 30),
            external=any(name.startswith("LMCache") or name in _CACHES for name in by_name),
            store="MooncakeStoreConnector" in by_name,
        )


@dataclass
class Transfer:
    """One transfer_id at a prefill: the two sides meet here."""

    kv: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    claimed: bool = False


class Producer:
    """Prefill's side: the bootstrap server and the KV that waits to be fetched."""

    def __init__(self, ranks: int) -> None:
        self.engine_ids = [str(uuid.uuid4()) if ranks == 1 else f"{uuid.uuid4()}_dp{rank}" for rank in range(ranks)]
        self.transfers: dict[tuple[int, str], Transfer] = {}
        self.delivered = 0
        self.expired = self.late = 0
        """Only NIXL has leases."""
        self.side_channel = "tcp://127.0.0.1:1"
        """Where upstream's worker would be asked to send; here it only accepts connections."""
        self.changed: Callable[[], None] = lambda: None
        """Called whenever KV is kept or delivered: whoever waits for the fake's state looks again."""

    @property
    def held(self) -> int:
        """Finished prefills whose KV nobody has asked for: the blocks that a lost decode leg leaks."""
        return sum(t.kv.done() and not t.claimed for t in self.transfers.values())

    def keep(self, rank: int, transfer_id: str, kv: str) -> None:
        transfer = self.transfers.setdefault((rank, transfer_id), Transfer())
        if not transfer.kv.done():
            transfer.kv.set_result(kv)
        if transfer.claimed:
            self.transfers.pop((rank, transfer_id), None)
            self.delivered += 1
        else:
            asyncio.get_running_loop().call_later(ABORT_SECONDS, self.transfers.pop, (rank, transfer_id), None)
        self.changed()

    async def handle(self, request: Request, responder: Responder) -> None:
        """The bootstrap server's requests."""
        if request.path == "/query":
            body = {
                str(rank): {"engine_id": engine_id, "worker_addr": {"0": {"0": self.side_channel}}}
                for rank, engine_id in enumerate(self.engine_ids)
            }
            await responder.send(200, body)
        elif request.path == "/fake/kv":
            await self._fetch(request.query, responder)
        else:
            await responder.send(404, {"detail": "Not Found"})

    async def _fetch(self, query: dict[str, str], responder: Responder) -> None:
        if query["engine_id"] not in self.engine_ids:
            await responder.send(404, {"detail": "remote engine_id not found"})
            return
        key = (self.engine_ids.index(query["engine_id"]), query["transfer_id"])
        transfer = self.transfers.setdefault(key, Transfer())
        # From here on the KV is sent as soon as it exists, even if the decode request is aborted meanwhile.
        transfer.claimed = True
        if transfer.kv.done():
            self.transfers.pop(key, None)
            self.delivered += 1
        self.changed()
        if query.get("release"):
            await responder.send(200, {})
        else:
            await responder.send(200, {"kv": await asyncio.shield(transfer.kv)})


async def fetch(params: dict[str, str], *, release: bool = False) -> str:
    """Decode's side: the KV of `params`, waiting for its prefill. `release`: only tell prefill not to keep it."""
    query = {"engine_id": params["remote_engine_id"], "transfer_id": params["transfer_id"]}
    url = f"{params['remote_bootstrap_addr']}/fake/kv?{urlencode(query | ({'release': '1'} if release else {}))}"
    try:
        async with asyncio.timeout(ABORT_SECONDS):
            try:
                status, body = await get_json(url)
            except (asyncio.IncompleteReadError, ConnectionResetError, BrokenPipeError):
                # The prefill died under us. ZeroMQ does not notice: upstream waits for its own timeout.
                await asyncio.Event().wait()
                raise AssertionError("unreachable") from None
    except OSError as error:
        raise KvLoadError(f"bootstrap server unreachable: {error}") from error
    if status != 200:
        raise KvLoadError(body["detail"])
    return str(body.get("kv", ""))


OTHER_KV = prefill([0]).hex()
_ANSWERED = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[7, 8, 9]]}


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
            **_ANSWERED,
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
    moriio = "remote_handshake_port" in params
    port, request = ("remote_handshake_port", "transfer_id") if moriio else ("remote_port", "remote_request_id")
    url = f"http://{params['remote_host']}:{params[port]}/fake/kv?{urlencode({'request': params[request]})}"
    try:
        _, body = await get_json(url)
    except (OSError, asyncio.IncompleteReadError) as error:
        raise KvLoadError(f"{'handshake failed' if moriio else 'side channel unreachable'}: {error}") from error
    return str(body["kv"])


class MoriioProducer(NixlProducer):
    """Prefill's side: what it keeps, it keeps as NIXL's does."""

    def keep_for(self, transfer_id: str, kv: str) -> dict[str, Any]:
        """The kv_transfer_params of the answer (`request_finished`)."""
        self._keep(transfer_id, kv)
        return {
            **_ANSWERED,
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
