"""One of the proxy's processes as their parent knows it, and what they are started with."""

from __future__ import annotations

from collections.abc import Mapping

from pdserve.pd.processes.handover import Heir, SharedFiles
from pdserve.pd.processes.heartbeat import Beats


class MemberConfiguration:
    """The start of members: the text of their configuration, and the files that they share."""

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

    def __init__(self, index: int, pid: int, control: int, asks: int, beats: Beats | None) -> None:
        self.index = index
        self.pid = pid
        self.control = control
        """We write control lines here."""
        self.asks = asks
        """What it wants all members to hear comes from here."""
        self.beats = beats
        self.heard = b""
        self.unread = bytearray()
        """Lines that its pipe has no room for."""
        self.old = False
        """It was there before the program that runs now, and that has not given up."""
        self.leaving = False
        """It serves until its successor does, which there is by now."""
        self.retired = False
        self.serving = False
        """It has served. One that ends before has failed to start, and the next one would too."""
        self.killed = False
        """By us: it has not failed to start."""

    @staticmethod
    def inherited(heir: Heir, beats: Mapping[int, Beats]) -> MemberProcess:
        """One of the program before. `beats`: by their file."""
        child = MemberProcess(
            heir.number, heir.pid, heir.control, heir.asks, None if heir.beats is None else beats[heir.beats]
        )
        child.old, child.retired, child.serving = True, heir.retired, True
        child.heard, child.unread = heir.heard.encode("latin-1"), bytearray(heir.unread.encode("latin-1"))
        return child

    def heir(self) -> Heir:
        """Return what the next program is to know of this process."""
        return Heir(
            self.index,
            self.pid,
            self.control,
            self.asks,
            self.retired,
            self.heard.decode("latin-1"),
            self.unread.decode("latin-1"),
            None if self.beats is None else self.beats.file,
        )
