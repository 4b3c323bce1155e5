"""Define a routing policy. A policy belongs to one role: a pool has its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from pdserve.pd.routing.ask import RoutingRequest


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


class Choice(Generic[W]):
    """`why` is a label of the decision counter, one of the policy's `reasons`."""

    __slots__ = ("why", "worker")

    def __init__(self, worker: W, why: str) -> None:
        self.worker = worker
        self.why = why


class Policy(Protocol):
    """Never waits, never raises."""

    @property
    def name(self) -> str:
        """Return the policy's name in a recipe."""
        ...

    @property
    def needs_tokens(self) -> bool:
        """Exact token ids are wanted in each RoutingRequest."""
        ...

    @property
    def reasons(self) -> tuple[str, ...]:
        """All that `why` of its choices can be. Few: each is a series of the decision counter."""
        ...

    def choose(self, candidates: Sequence[W], ask: RoutingRequest) -> Choice[W]:
        """One of the candidates, of which there is at least one; all of them could serve the request."""
        ...

    def routed(self, worker: RoutingCandidate, ask: RoutingRequest) -> None:
        """The request went there: after `choose`, or by another's decision."""
        ...

    def forget(self, name: str) -> None:
        """Forget a worker that lost its cache: it died, restarted or was removed."""
        ...

    def matched(self, worker: RoutingCandidate, ask: RoutingRequest) -> int:
        """Prompt tokens that this worker probably holds; 0 when the policy knows nothing."""
        ...
