"""Who gets a connection when a process has as many as it may have.

One client must not keep the others out with connections on which it asks nothing. So the new one comes in, and the
client with the most connections loses one on which nothing is being answered: first those that never asked for
anything, at last those on which a request is arriving. When all are being answered, a few places beyond the limit are
left for probes: whoever watches the proxy must not take it for dead because it is busy.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.pd.http.connection import Connection

PROBE_PLACES = 16
"""Beyond the limit. Open files are reserved for them (pd.descriptors)."""
PLACE, PROBE_PLACE, NO_PLACE = 0, 1, 2
_SHARE = 64
"""One of so many is closed at once: looking at all of them for each new connection would cost too much."""


def place_for_new(connections: set[Connection], most: int) -> int:
    """PLACE; PROBE_PLACE: only for probes; NO_PLACE: none at all. May close connections of others."""
    if len(connections) < most:
        return PLACE
    make_room(connections, most)
    if len(connections) < most:
        return PLACE
    return PROBE_PLACE if len(connections) < most + PROBE_PLACES else NO_PLACE


def make_room(connections: set[Connection], most: int) -> None:
    """Closes some on which nothing is being answered, of the clients with the most connections."""
    held = Counter(one.peer for one in connections)
    waiting = [one for one in connections if not one.answering and not one.congested]
    waiting.sort(key=lambda one: (-held[one.peer], one.arriving, one.asked, one.deadline))
    for one in waiting[: max(1, len(connections) - most + 1, most // _SHARE)]:
        connections.discard(one)
        one.abort()
