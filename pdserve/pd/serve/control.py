"""The control channel: JSON lines from the launcher on stdin.

    {"worker": "prefill-0", "state": "ready"}
    {"workers": [{"name": "prefill-0", ...}, ...], "states": {"prefill-0": "ready", ...}}

The second names all workers of the deployment. Those that the proxy lacks come. Those that it has and that are not
named get no request any more, and go once their last one is over. One that has changed under its name takes the place
of the old one. All others stay.

Between the processes of one proxy an admin's orders travel the same way: {"add": {...}}, {"remove": "decode-3"},
{"reload": true}; and what a rolling restart of them needs: {"admin": "free"}, {"not_restarted": "why"},
{"retiring": 2}, the number of processes that end what they have begun. Behind {"told": true} a new process knows what
its siblings know.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from typing import IO, Protocol

from pydantic import BaseModel, ConfigDict

from pdserve.errors import PdserveError
from pdserve.pd.config.proxy import ProxyConfig, WorkerConfig
from pdserve.pd.processes.control_lines import TOLD
from pdserve.pd.workers.registry import STATES, Registry, WorkerState

log = logging.getLogger("pdserve.proxy")

_LONGEST_LINE = 1 << 22
"""Bytes: all workers of a large deployment are in one line."""


class WorkerSet(BaseModel):
    """The message that names all workers."""

    model_config = ConfigDict(extra="forbid")

    workers: list[WorkerConfig]
    states: dict[str, WorkerState] = {}


class ControlTarget(Protocol):
    """The gateway, as the lines of control act on it."""

    config: ProxyConfig
    registry: Registry

    def add_worker(self, config: WorkerConfig) -> None: ...

    def set_workers(self, configs: Sequence[WorkerConfig], states: Mapping[str, WorkerState]) -> None: ...

    not_restarted: str
    retiring: int

    def begin_reload(self) -> None: ...

    def open_admin(self) -> None: ...


def apply(gateway: ControlTarget, line: bytes) -> None:
    """Apply one line. What cannot be read is logged and skipped: the proxy never dies of its control channel."""
    try:
        message = json.loads(line)
        if "workers" in message:
            wanted = WorkerSet.model_validate(message)
            gateway.set_workers(wanted.workers, wanted.states)
            log.info("control: the workers are %s", ", ".join(worker.name for worker in wanted.workers))
            return
        if "add" in message:
            gateway.add_worker(WorkerConfig.model_validate(message["add"]))
            return
        if "remove" in message:
            gateway.registry.remove(message["remove"])
            return
        if "reload" in message:
            gateway.begin_reload()
            return
        if "admin" in message:
            _open_admin(gateway)
            return
        if "not_restarted" in message:
            gateway.not_restarted = str(message["not_restarted"])
            return
        if "retiring" in message:
            gateway.retiring = int(message["retiring"])
            return
        worker, state = message["worker"], message["state"]
    except (ValueError, TypeError, KeyError) as error:
        log.warning("control: cannot use %r: %s", line[:200], error)
        return
    if not isinstance(worker, str) or worker not in gateway.registry.workers or state not in STATES:
        log.warning("control: unknown worker or state in %r", line[:200])
        return
    gateway.registry.set_state(worker, state)
    log.info("control: %s is %s", worker, state)


def _open_admin(gateway: ControlTarget) -> None:
    """Open the admin; without it a process serves on, and hears of the workers."""
    try:
        gateway.open_admin()
    except PdserveError as error:
        log.error(
            "control: the admin's listener is not open: %s: %s; %s, then restart the proxy (pdserve restart proxy)",
            error.where,
            error.what,
            error.todo or "correct that",
        )


async def listen(gateway: ControlTarget, source: IO[bytes] | IO[str], told: asyncio.Event) -> None:
    """Read a pipe until its end. The end means nothing: the proxy serves on, its owner stops it. `told` is set once
    the lines of the start have been heard."""
    reader = asyncio.StreamReader(limit=_LONGEST_LINE)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), source)
    try:
        while not reader.at_eof():
            try:
                line = await reader.readline()
            except ValueError:
                log.warning("control: skipped a line that is too long")
                continue
            if line.rstrip() == TOLD:
                told.set()
            elif line:
                apply(gateway, line)
    finally:
        transport.close()
