"""A client that is behind: it has not read yet what it was sent, and its engine is held back meanwhile."""

from __future__ import annotations

import asyncio
import fcntl
import sys
import termios

from pdserve.pd.http.incoming import ClientLimits


class Behind:
    """Wait for a client that lags, as long as it reads on, up to a limit. Whether it does is seen when the longest
    pause is over, so that one which stops is waited for up to two of them."""

    __slots__ = ("_limits", "_transport", "_unread", "_until", "deadline")

    def __init__(self, transport: asyncio.WriteTransport, limits: ClientLimits, now: float) -> None:
        self._transport, self._limits = transport, limits
        self._until = now + limits.body_seconds
        self._unread = _unread(transport)
        self.deadline = min(now + limits.body_idle_seconds, self._until)
        """Loop time at which it is looked at."""

    def reads_on(self, now: float) -> bool:
        """It has read something since the last look, and may go on."""
        before, self._unread = self._unread, _unread(self._transport)
        self.deadline = min(now + self._limits.body_idle_seconds, self._until)
        return self._unread < before and now < self._until


def _unread(transport: asyncio.WriteTransport) -> int:
    """Bytes, in this process and in the kernel, that the client's machine has not acknowledged. The kernel may have
    megabytes, and takes more of ours only when a third of them has left. A system call: not for each write."""
    size = transport.get_write_buffer_size()
    sock = transport.get_extra_info("socket")
    if sock is None or sock.fileno() < 0:  # it has just ended
        return size
    try:
        # SIOCOUTQ, by its other name.
        kernel = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
    except OSError:  # no such count of this kind of connection
        return size
    return size + int.from_bytes(kernel, sys.byteorder)
