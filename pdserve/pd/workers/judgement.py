"""The rule by which failures are judged: what they say about a worker, and what about a request.

1. A worker is *doubtful* once it has failed with two requests since it last answered one. Some faults speak against it
   at once: it cannot be reached, says that it takes nothing (503, 429), loses the connection while it computes, or
   keeps silent while its siblings answer.
2. Who is doubtful gets requests only while no other worker of its role may be used, whatever the policy. So when all
   are doubtful (poison at a rate), none is.
3. A canary, a request of nobody's, tries who is doubtful: after a second, then at growing intervals, one at a time
   (relay/worker_trials.py). Who answers it is used again; until it answers a client too, one failure makes it doubtful.
4. A request that failed is tried with other workers: as often as one cannot be reached, else `ATTEMPTS` times in all.
   One whose connection was lost while a worker computed it may have killed that worker: it is tried with one more.
5. With the second worker that failed with it (another 5xx, a lost connection, silence) a request is to blame and its
   tries are over; but not while both are doubtful and one is left that is not: then they may be to blame.
6. An answer blames all who had failed with the request, and clears who gave it. What nobody answers blames nobody: so
   no client can take a worker from the others by what it sends.
7. A 4xx is the request's own, and final. But a 404 of a worker that answers nobody (it has failed or answered 404 since
   its last answer, or that is `open_seconds` ago) is a failure like a 5xx, if a sibling answers: one engine of a pool
   may lack its model.
8. The breaker shows a worker that was proven bad `failures` times in a row: blamed, failed with a canary, or not
   reached; not while it answers others. Then a canary comes every `open_seconds`. Who cannot be reached gets no
   request meanwhile, even if it is the only one of its role.

Each process of a proxy judges for itself, by what its own requests and canaries meet.
"""

from __future__ import annotations

from typing import Final, Literal

Fault = Literal["unreachable", "unavailable", "lost", "silent", "failed", "absent"]
"""How a worker failed with a request: no connection; 503 or 429; the connection ended before the answer; no first byte
in time; any other 5xx; 404."""

ATTEMPTS: Final = 3
_DOUBTFUL: Final = 2
"""Failures since the last answer."""
_AT_ONCE: Final = frozenset(("unreachable", "unavailable", "lost", "silent"))
_SUSPICIOUS: Final = frozenset(("lost", "silent", "failed", "absent"))
"""Those of which the request may be the cause."""
_FIRST_PAUSE: Final = 1.0
"""Seconds until the first canary."""


class Judgement:
    """The judgement of one worker. Times are those of the event loop."""

    __slots__ = (
        "_all_doubtful",
        "_answered",
        "_canary_at",
        "_failures",
        "_limit",
        "_open_seconds",
        "_pause",
        "_proofs",
        "_reachable",
        "_tried",
        "alive",
    )

    def __init__(self, failures: int, open_seconds: float, all_doubtful: set[Judgement]) -> None:
        """`all_doubtful`: has this one, among others, while it is doubtful."""
        self._limit = failures
        self._open_seconds = open_seconds
        self._all_doubtful = all_doubtful
        self.alive = -open_seconds
        """When there was last a sign that its engine computes: it began an answer, or counted tokens."""
        self._answered = -open_seconds
        """When it last began an answer."""
        self._failures = 0
        """Since then."""
        self._proofs = 0
        """Failures of those that were its own."""
        self._reachable = True
        self._pause = 0.0
        self._canary_at = 0.0
        self._tried = False
        """A canary is with it."""

    @property
    def doubtful(self) -> bool:
        return self._failures >= _DOUBTFUL

    @property
    def shut(self) -> bool:
        """No request goes there."""
        return not self._reachable and self._proofs >= self._limit

    @property
    def state(self) -> str:
        """closed | open, of the breaker: for people and metrics."""
        return "closed" if self._proofs < self._limit else "open"

    def is_unproven(self, now: float) -> bool:
        """It answers nobody, as far as is known: it has failed since its last answer, or that is long ago."""
        return self._failures > 0 or now - self._answered >= self._open_seconds

    def answers(self, now: float) -> bool:
        """It is known to serve."""
        return self._failures < _DOUBTFUL and now - self.alive < self._open_seconds

    def answered(self, now: float) -> None:
        """It has begun a good answer."""
        self.alive = self._answered = now
        if self._failures:
            self._clear(wholly=not self._tried)

    def renewed(self) -> None:
        """It is a new engine, or one that went on: what the old one did counts no more."""
        self.alive = self._answered = -self._open_seconds
        self._clear(wholly=True)

    def failed(self, fault: Fault, now: float) -> None:
        """It failed with a request."""
        self._failures += _DOUBTFUL if fault in _AT_ONCE else 1
        self._reachable = fault != "unreachable"
        if not self._reachable:
            self._prove(now)
        self._doubt(now)

    def blamed(self, now: float) -> None:
        """It failed with a request that another worker then answered."""
        if self._failures and (now - self._answered >= self._open_seconds or self.state == "open"):
            self._prove(now)

    def forgotten(self) -> None:
        """Its worker was removed. Requests may fail there yet."""
        self._all_doubtful.discard(self)
        self._all_doubtful = set()

    # --- for who sends the canaries

    def is_due(self, now: float) -> bool:
        """A canary is to try it now."""
        return self._failures >= _DOUBTFUL and now >= self._canary_at and not self._tried

    def canary_begins(self, now: float) -> None:
        self._tried = True
        if self._failures:
            self._pause = min(2 * self._pause, self._open_seconds)
            self._canary_at = now + self._pause

    def canary_failed(self, fault: Fault, now: float) -> None:
        """No client is to blame for that."""
        self.failed(fault, now)
        if self._reachable:
            self._prove(now)

    def canary_refused(self) -> None:
        """Its answer shows nothing: not every model completes a prompt. So a client's request is the next trial."""
        self._clear(wholly=False)

    def canary_ended(self) -> None:
        self._tried = False

    # --- inside

    def _prove(self, now: float) -> None:
        self._proofs += 1
        if self._proofs >= self._limit:
            self._failures = max(self._failures, _DOUBTFUL)
            self._doubt(now)
            self._canary_at = max(self._canary_at, now + self._open_seconds)

    def _doubt(self, now: float) -> None:
        if self._failures >= _DOUBTFUL and self not in self._all_doubtful:
            self._all_doubtful.add(self)
            self._pause = self._pause or min(_FIRST_PAUSE, self._open_seconds)
            self._canary_at = max(self._canary_at, now + self._pause)

    def _clear(self, *, wholly: bool) -> None:
        self._all_doubtful.discard(self)
        self._reachable = True
        if wholly:
            self._failures = self._proofs = 0
            self._pause = self._canary_at = 0.0
        else:
            # A canary may be all that it answers.
            self._failures, self._proofs = _DOUBTFUL - 1, min(self._proofs, self._limit - 1)


class Inquiry:
    """Finds out why a worker failed with one request."""

    __slots__ = ("_lost", "_suspects", "_tries")

    def __init__(self) -> None:
        self._lost = 0
        self._suspects: list[Judgement] = []
        self._tries = 0

    def add(self, judgement: Judgement, fault: Fault | None, now: float) -> None:
        """One more failure. None: by no fault of the worker, of which only our knowledge was stale."""
        if fault is not None:
            judgement.failed(fault, now)
        if fault in _SUSPICIOUS:
            self._suspects.append(judgement)
        self._lost += fault == "lost"
        self._tries += fault != "unreachable"

    def is_over(self, *, answering_left: bool) -> bool:
        """It is not to be tried again. `answering_left`: a worker of the role that failed is neither tried nor
        doubtful."""
        if self._tries >= ATTEMPTS or self._lost > 1:
            return True
        if len(self._suspects) < 2:
            return False
        return not answering_left or not all(suspect.doubtful for suspect in self._suspects)

    @property
    def killed(self) -> bool:
        """Two workers lost their connections while they computed it."""
        return self._lost > 1

    def answered(self, now: float) -> None:
        """Another worker has begun an answer."""
        for suspect in self._suspects:
            suspect.blamed(now)
