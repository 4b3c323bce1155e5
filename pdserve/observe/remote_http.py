"""Read what listens on the loopback of another node, through the launcher and the agent there.

Such a URL has the host `NODE.pdserve`, which exists for this client only: two nodes have the same loopback
address.
"""

from __future__ import annotations

import asyncio
import json
from urllib.parse import urlsplit, urlunsplit

import httpx

from pdserve.errors import StateError
from pdserve.observe.metrics import view_client
from pdserve.plan.model import LmcacheServer, Plan
from pdserve.plan.process import Process
from pdserve.reach.protocol import Answered
from pdserve.run.directory import RunDir, has_living_launcher
from pdserve.run.inbox import Fetch, ask
from pdserve.run.state import DeploymentState
from pdserve.system.host import is_here

_SUFFIX = ".pdserve"
_DEFAULT_SECONDS = 5.0
_MARGIN_SECONDS = 10.0


def seen_from_here(plan: Plan, state: DeploymentState) -> Plan:
    """Return the plan with the URLs of LMCache servers as `client` can reach them from this machine."""

    def seen(server: LmcacheServer) -> LmcacheServer:
        port = urlsplit(server.http_url).port or 0
        return server.model_copy(update={"http_url": loopback_of(plan.process(server.process), port, state)})

    return plan.model_copy(update={"lmcache": tuple(map(seen, plan.lmcache))})


def loopback_of(process: Process, port: int, state: DeploymentState) -> str:
    """Return the URL of a port on the loopback of a process's node, as `client` can reach it from this machine."""
    node = state.nodes.get(process.node)
    here = node is None or is_here(node.hostname, node.place)
    return f"http://127.0.0.1:{port}" if here else f"http://{process.node}{_SUFFIX}:{port}"


def client(run: RunDir, state: DeploymentState, *, taken_within: float | None = None) -> httpx.AsyncClient:
    """Return a client for the URLs of `seen_from_here`, and for all others as ever. `taken_within`: see control.ask."""
    return view_client({f"all://*{_SUFFIX}": _ThroughLauncher(run, state, taken_within)})


class _ThroughLauncher(httpx.AsyncBaseTransport):
    def __init__(self, run: RunDir, state: DeploymentState, taken_within: float | None) -> None:
        self._taken_within = taken_within
        self._run = run
        self._state = state

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        node = request.url.host.removesuffix(_SUFFIX)
        url = urlsplit(str(request.url))
        seconds = float((request.extensions.get("timeout") or {}).get("read") or _DEFAULT_SECONDS)
        fetch = Fetch(
            node=node,
            method="POST" if request.method == "POST" else "GET",
            url=urlunsplit(url._replace(netloc=f"127.0.0.1:{url.port}")),
            body=(await request.aread()).decode() or None,
            seconds=seconds,
        )

        def launcher_lives() -> bool:
            return has_living_launcher(self._run, self._state)

        try:
            reply = await asyncio.to_thread(
                ask,
                self._run,
                fetch,
                seconds=seconds + _MARGIN_SECONDS,
                alive=launcher_lives,
                taken_within=self._taken_within,
            )
        except StateError as error:
            raise httpx.ReadTimeout(error.what, request=request) from error
        if reply.exit_code:  # its agent is gone
            raise httpx.ReadError(reply.message, request=request)
        answer = Answered.model_validate(json.loads(reply.message))
        if answer.status is None:
            raise httpx.ConnectError(answer.error, request=request)
        return httpx.Response(answer.status, content=answer.body, request=request)
