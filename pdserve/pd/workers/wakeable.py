"""Define a waiter for a worker or a client, as those see it that wake it."""

from __future__ import annotations


class Wakeable:
    """Base class of a wait that others may end (relay.waiting.Watch)."""

    __slots__ = ()

    def poke(self) -> None:
        """Something has changed that may be waited for."""
        raise NotImplementedError

    def wake(self) -> None:
        """Something has happened that ends the wait, or may."""
        raise NotImplementedError
