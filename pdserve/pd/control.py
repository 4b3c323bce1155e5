"""The control channel: JSON lines from the launcher on stdin, {"worker": "prefill-0", "state": "ready"}."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import stat
import sys

from pdserve.pd.registry import STATES, Registry

log = logging.getLogger("pdserve.proxy")


def stdin_is_control() -> bool:
    """A launcher talks through a pipe or a socket; a terminal, a file or nothing at all is standalone use."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def apply(registry: Registry, line: bytes) -> None:
    """One line. What cannot be read is logged and skipped: the proxy never dies of its control channel."""
    try:
        message = json.loads(line)
        worker, state = message["worker"], message["state"]
    except (ValueError, TypeError, KeyError):
        log.warning("control: cannot read %r", line[:200])
        return
    if not isinstance(worker, str) or worker not in registry.workers or state not in STATES:
        log.warning("control: unknown worker or state in %r", line[:200])
        return
    registry.set_state(worker, state)
    log.info("control: %s is %s", worker, state)


async def listen(registry: Registry) -> None:
    """Read stdin until its end. The end means nothing: the proxy serves on, its owner stops it."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    try:
        while not reader.at_eof():
            try:
                line = await reader.readline()
            except ValueError:
                log.warning("control: skipped a line that is too long")
                continue
            if line:
                apply(registry, line)
    finally:
        transport.close()
