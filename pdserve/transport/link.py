"""The launcher's end of an agent's pipe."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import Callable

from pdserve.errors import AgentProtocolError
from pdserve.protocol import Event, Gone, Order, decode_event, encode

_LINE_LIMIT = 16 * 1024 * 1024


class AgentLink:
    """Sends orders, hands every event to `receive`, and says Gone when the pipe closes. Closing it stops the node."""

    def __init__(self, node: str, popen: subprocess.Popen[bytes], receive: Callable[[Event], None]) -> None:
        self.node = node
        self._popen = popen
        self._receive = receive
        self._reader = asyncio.create_task(self._read())
        self._reader.add_done_callback(self._stopped_reading)

    def send(self, order: Order) -> None:
        """Writes one order. An agent that is gone is reported by Gone, not here."""
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(encode(order))
            self._popen.stdin.flush()
        except OSError:
            return

    async def _read(self) -> None:
        assert self._popen.stdout is not None
        stream = asyncio.StreamReader(limit=_LINE_LIMIT)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), self._popen.stdout)
        how = "its pipe closed"
        try:
            while line := await stream.readline():
                self._receive(decode_event(line, self.node))
        except AgentProtocolError as error:
            how = error.render()
        finally:
            transport.close()
        self._receive(Gone(node=self.node, how=how))

    def _stopped_reading(self, reader: asyncio.Task[None]) -> None:
        """A reader that fails must not leave a launcher that sees nothing any more and believes that all is well."""
        if not reader.cancelled() and (error := reader.exception()) is not None:
            self._receive(Gone(node=self.node, how=f"its events can no longer be read: {error!r}"))

    async def close(self, seconds: float) -> bool:
        """Closes the pipe and waits until the node's guard has left: nothing of ours runs there any more.

        False when it is still there after `seconds`; it is not killed, because it is the one that cleans up.
        """
        if self._popen.stdin is not None and not self._popen.stdin.closed:
            with contextlib.suppress(OSError):
                self._popen.stdin.close()
        try:
            await asyncio.to_thread(self._popen.wait, seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        return True
