"""What a routing policy is. A policy belongs to one role: a pool has its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar, get_args

from pdserve.pd.routing.ask import RoutingRequest

Why = Literal[
    "turn",  # round_robin
    "least_loaded",
    "power_of_two",
    "match",  # holds most of the prompt, and is not too busy
    "no_match",  # no worker holds enough of it: the least loaded
    "overloaded",  # who holds most of it is too busy: the least loaded
    "no_tokens",  # kv_events does not know the token ids: the least loaded
    "session",  # affinity: the session's own worker
    "session_spilled",  # affinity: that one is too busy, the session's next
]
WHYS: tuple[Why, ...] = get_args(Why)


class RoutingCandidate(Protocol):
    """The load figures of a worker, kept up to date by the data plane."""

    @property
    def name(self) -> str: ...
    @property
    def requests(self) -> int:
        """Legs in flight, over all proxy processes."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """Estimated tokens of prompts in flight that it has not finished prefilling."""
        ...

    @property
    def kv_usage(self) -> float:
        """0..1, at most 2 s old; 0.0 while unknown."""
        ...


W = TypeVar("W", bound=RoutingCandidate)


class Choice(NamedTuple, Generic[W]):
    """`why` is a label of the decision counter."""

    worker: W
    why: Why


class Policy(Protocol):
    """Never waits, never raises."""

    @property
    def name(self) -> str:
        """As in the recipe."""
        ...

    @property
    def needs_tokens(self) -> bool:
        """Exact token ids are wanted in each RoutingRequest."""
        ...

    def choose(self, candidates: Sequence[W], ask: RoutingRequest) -> Choice[W]:
        """One of the candidates, of which there is at least one; all of them could serve the request."""
        ...

    def routed(self, worker: RoutingCandidate, ask: RoutingRequest) -> None:
        """The request went there: after `choose`, or by another's decision."""
        ...

    def forget(self, name: str) -> None:
        """This worker lost its cache: it died, restarted or was removed."""
        ...

    def matched(self, worker: RoutingCandidate, ask: RoutingRequest) -> int:
        """Prompt tokens that this worker probably holds; 0 when the policy knows nothing."""
        ...
