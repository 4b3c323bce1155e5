"""A restart of the proxy that refuses no connection: it replaces its own processes, and is asked how far it is."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from pdserve.errors import StartError
from pdserve.launch.fleet import Fleet
from pdserve.plan.process import Process
from pdserve.reach.protocol import AskNode
from pdserve.time_limit import time_limit

_PROXY = "proxy"
_ASK_SECONDS = 5.0
_RETRY_SECONDS = 0.1


async def roll(fleet: Fleet, process: Process | None = None) -> bool:
    """Returns when new processes serve; what runs in the old ones goes on there. False: this proxy has no rolling
    restart. Raises StartError: the new ones could not start, and the old ones serve on.

    `process`: the proxy with another configuration, which the new processes get; None: as it is."""
    process = process or fleet.plan.process(_PROXY)
    if process.control != "stdin" or len(process.files) != 1 or fleet.phase_of(_PROXY) != "ready":
        return False
    if _writes_to_a_deleted_log(fleet):
        return False
    ask, url = fleet.on_node_of(_PROXY), f"{fleet.plan.proxy_url}/health"
    before = await _state_of(ask, url)
    if not isinstance(before.get("generation"), int):
        return False
    # Its file may be gone with the record of the run.
    (config,) = process.files.values()
    fleet.push(_PROXY, "restart", {"restart": True, "config": config})
    fleet.record("rolling", name=_PROXY)
    why = f"its new processes did not serve within {process.ready_seconds:.0f} s"
    try:
        async with time_limit(process.ready_seconds):
            while True:
                state = await _state_of(ask, url)
                generation = state.get("generation")
                if isinstance(generation, int) and generation > before["generation"]:
                    fleet.record("rolled", name=_PROXY)
                    return True
                if state and state.get("not_restarted") != before.get("not_restarted"):
                    why = str(state.get("not_restarted"))
                    break
                await asyncio.sleep(_RETRY_SECONDS)
    except TimeoutError:
        pass
    fleet.record("not_rolled", name=_PROXY, why=why)
    raise StartError(
        f"the proxy was not replaced: {why}",
        where=_PROXY,
        cause="the program or its configuration is not what it was when the one that serves was started",
        todo=f"pdserve logs {_PROXY}; the old one serves on",
    )


def _writes_to_a_deleted_log(fleet: Fleet) -> bool:
    """The record was deleted since it was started: only a new start opens a log that can be read."""
    try:
        events, _ = fleet.run.read_events()
    except OSError:
        return True
    kinds = [
        "deleted" if event["event"] == "record_deleted" else "started"
        for event in events
        if event["event"] == "record_deleted" or (event["event"] == "started" and event.get("name") == _PROXY)
    ]
    return bool(kinds) and kinds[-1] == "deleted"


async def _state_of(ask: AskNode, url: str) -> dict[str, Any]:
    """The proxy's /health; empty if there is no answer, or another one."""
    answer = await ask("GET", url, seconds=_ASK_SECONDS)
    try:
        state = json.loads(answer.body)
    except ValueError:
        return {}
    return state if isinstance(state, dict) else {}
