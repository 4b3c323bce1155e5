"""Decide who gets a connection when a process has as many as it may have.

One client must not keep the others out with connections on which it asks nothing. So the new one comes in, and the
client with the most connections loses one on which nothing is being answered: first those that never asked for
anything, at last those on which a request is arriving. When all are being answered, a few places beyond the limit are
left for probes: a monitor must not take a busy proxy for a dead one.
"""

from __future__ import annotations

from collections import Counter

from pdserve.pd.http.client_connection import ClientConnection

PROBE_PLACES = 16
"""Beyond the limit. Open files are reserved for them (serve.descriptors)."""
PLACE, PROBE_PLACE, NO_PLACE = 0, 1, 2
_SHARE = 64
"""One of so many is closed at once: looking at all of them for each new connection would cost too much."""


_LOOK_AGAIN_SECONDS = 0.1
"""8,192 connections take 8 ms to look at, and each newcomer would cost as much."""


class Places:
    """Decides whether a new connection gets a place, and closes others for it."""

    __slots__ = ("_full_pays", "_look_again", "_room")

    def __init__(self) -> None:
        self._look_again = 0.0
        """Loop time. Before it, who is there is looked at only if the last look was worth it."""
        self._room = False
        """It made room."""
        self._full_pays = True
        """When all places for probes were taken too, a connection was closed there."""

    def for_new(self, connections: set[ClientConnection], most: int, now: float) -> int:
        """PLACE; PROBE_PLACE: only for probes; NO_PLACE: none at all. May close connections of others. `now`: loop
        time."""
        if len(connections) < most:
            return PLACE
        full = len(connections) >= most + PROBE_PLACES
        if now >= self._look_again or (self._full_pays if full else self._room):
            self._look_again = now + _LOOK_AGAIN_SECONDS
            closed = make_room(connections, most)
            if full or closed:
                self._full_pays = closed
            self._room = len(connections) < most
            if self._room:
                return PLACE
        return PROBE_PLACE if len(connections) < most + PROBE_PLACES else NO_PLACE


def make_room(connections: set[ClientConnection], most: int) -> bool:
    """Closes some on which nothing is being answered, of the clients with the most connections. Whether there were
    any."""
    held = Counter(connection.peer for connection in connections)
    waiting = [connection for connection in connections if not connection.answering and not connection.congested]
    waiting.sort(
        key=lambda connection: (-held[connection.peer], connection.arriving, connection.asked, connection.deadline)
    )
    for connection in waiting[: max(1, len(connections) - most + 1, most // _SHARE)]:
        connections.discard(connection)
        connection.abort()
    return bool(waiting)
