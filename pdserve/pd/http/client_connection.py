"""A connection of a client, as the front that holds it and the choice of places see it."""

from __future__ import annotations

from pdserve.pd.http.reply import ReplyConnection


class ClientConnection(ReplyConnection):
    """Base class of http.connection.Connection."""

    __slots__ = ("asked", "deadline", "peer")

    peer: str
    """The client's address; empty before the connection is made."""
    asked: bool
    """A request was complete."""
    deadline: float
    """Loop time at which `late` is called."""

    @property
    def unsent(self) -> bool:
        """Something waits to be sent."""
        raise NotImplementedError

    @property
    def answering(self) -> bool:
        """A request is being answered, or waits for the answer before its own."""
        raise NotImplementedError

    @property
    def arriving(self) -> bool:
        """A part of a request is there."""
        raise NotImplementedError

    def late(self) -> None:
        """The deadline has passed."""
        raise NotImplementedError

    def close_if_idle(self) -> None:
        """Closes now, or after the reply that is being written."""
        raise NotImplementedError
