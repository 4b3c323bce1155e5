"""One of the proxy's processes as their parent knows it, and what they are started with."""

from __future__ import annotations

from pdserve.pd.processes.handover import SharedFiles
from pdserve.pd.processes.heartbeat import Beats


class Configured:
    """What members are started with: the text of their configuration, and the files that they share."""

    def __init__(
        self,
        text: bytes,
        before: bytes = b"",
        refused: str = "",
        *,
        shared: SharedFiles | None = None,
        shared_before: SharedFiles | None = None,
    ) -> None:
        """`before`, `shared_before`: what the members of the program before run with. `refused`: why the file's own
        cannot be used."""
        self.text = before if refused else text
        self.before = before
        self.refused = refused
        self.shared = shared
        self.shared_before = shared_before

    def now(self, text: bytes, *, old: bool) -> None:
        """Members have read theirs again. `old`: those of the program before."""
        if old:
            self.before = text
        else:
            self.text = text

    def go_back(self) -> None:
        """The members of the program before are those that serve."""
        self.text = self.before or self.text
        self.shared = self.shared_before or self.shared


class MemberProcess:
    """A member as its parent knows it."""

    def __init__(self, index: int, pid: int, control: int, asks: int, born: float, beats: Beats | None) -> None:
        self.index = index
        self.pid = pid
        self.control = control
        """We write control lines here."""
        self.asks = asks
        """What it wants all members to hear comes from here."""
        self.born = born
        self.beats = beats
        self.heard = b""
        self.unread = bytearray()
        """Lines that its pipe has no room for."""
        self.old = False
        """It was there before the program that runs now, and that has not given up."""
        self.retired = False
        self.serving = False
