"""A trace, read: sessions of turns, with what each turn adds to the prompt. Data only."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pdserve.plan.frozen import Frozen

TraceFormat = Literal["mooncake", "conversations", "sub-agents", "messages"]
Piece = tuple[Hashable, float]
"""Some text of a prompt, and its tokens: the same text is the same piece."""


@dataclass(frozen=True)
class Turn:
    """A request."""

    output_tokens: int
    pieces: Sequence[Piece]
    """What is new in its prompt, or all of it."""
    whole: bool
    """All of it: neither former turns nor answers come before it."""
    input_tokens: int | None = None
    """Of its pieces, where the trace has lengths."""


@dataclass(frozen=True)
class Session:
    """Turns that follow each other, each after the answer to the one before."""

    id: str
    turns: tuple[Turn, ...]
    rows: tuple[Mapping[str, Any], ...]
    """For AIPerf: lines of its own format."""
    parent: tuple[str, int] | None = None
    """The session and the turn whose prompt and answer it continues (a fork)."""
    root: bool = True
    """It begins by itself. A sub-agent does not: another session starts it."""


@dataclass(frozen=True)
class RequestTrace:
    """In the order of its file."""

    name: str
    digest: str
    """SHA-256 of the file."""
    format: TraceFormat
    sessions: tuple[Session, ...]
    block: int | None = None
    """Tokens of a block with a hash id; None: it has none."""

    @property
    def requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)

    @property
    def roots(self) -> int:
        return sum(session.root for session in self.sessions)

    def asked_output(self) -> Mapping[tuple[str, int], int]:
        """By session and turn."""
        return {
            (session.id, index): turn.output_tokens
            for session in self.sessions
            for index, turn in enumerate(session.turns)
        }


class TraceFacts(Frozen):
    """Of a trace that was replayed, for the result."""

    name: str
    digest: str
    format: TraceFormat
    sessions: int
    requests: int
    block: int | None = None
    prefix_hit: float
    """In theory: the share of prompt tokens that stand at the beginning of an earlier prompt too, with a cache of any
    size, one request at a time in the order of the file."""
    estimated: bool
    """The lengths of its texts are known in characters only."""
