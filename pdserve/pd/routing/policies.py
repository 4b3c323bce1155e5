"""The routing policies that a recipe can name, what two of them share, and session affinity around any of them."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from random import Random
from typing import ClassVar, Final

from pdserve.pd.config.routing import KvEventsSettings
from pdserve.pd.config.routing import PrefixAwareSettings as PrefixSettings
from pdserve.pd.routing.ask import RoutingRequest
from pdserve.pd.routing.burden import Burden
from pdserve.pd.routing.chain import GrowingChain
from pdserve.pd.routing.kv_index import KvIndex
from pdserve.pd.routing.policy import Choice, Policy, RoutingCandidate, W
from pdserve.pd.routing.turns import Turns
from pdserve.roles import EngineRole

MATCH: Final = "match"  # holds most of the prompt, and is not too busy
NO_MATCH: Final = "no_match"  # no worker holds enough of it: the least loaded
OVERLOADED: Final = "overloaded"  # the worker that holds most of it is too busy: the least loaded
BY_MATCH: Final = (MATCH, NO_MATCH, OVERLOADED)


def by_match(
    candidates: Sequence[W], held: list[int], burden: Burden, ask: RoutingRequest, min_ratio: float
) -> Choice[W]:
    """The least loaded of those that hold most of the prompt, unless that is too little of it, or they are too busy.
    `held`: tokens of it that each candidate holds."""
    most = 0
    for tokens in held:
        if tokens > most:
            most = tokens
    if not most or most < min_ratio * ask.estimate:
        return Choice(burden.least(candidates), NO_MATCH)
    best = [candidate for place, candidate in enumerate(candidates) if held[place] == most]
    if len(best) < len(candidates):
        calm = burden.calmest(candidates)
        if held[calm] < most and burden.too_busy(best[burden.calmest(best)], candidates[calm], saved=most - held[calm]):
            return Choice(burden.least(candidates), OVERLOADED)
    return Choice(burden.least(best), MATCH)


TURN: Final = "turn"


class RoundRobin:
    """Send to every worker in turn, whatever its load (`round_robin`)."""

    name = "round_robin"
    needs_tokens = False
    reasons: ClassVar[tuple[str, ...]] = (TURN,)

    def __init__(self, role: EngineRole, random: Random) -> None:
        self._turns = Turns(random if role == "decode" else None)

    def choose(self, candidates: Sequence[W], ask: RoutingRequest) -> Choice[W]:
        return Choice(self._turns.next(candidates), TURN)

    def routed(self, worker: RoutingCandidate, ask: RoutingRequest) -> None:
        """Turns are counted in `choose`."""

    def forget(self, name: str) -> None:
        self._turns.forget(name)

    def matched(self, worker: RoutingCandidate, ask: RoutingRequest) -> int:
        return 0


LEAST_LOADED: Final = "least_loaded"


class LeastLoaded:
    """Send to the least loaded: prefill by prompt tokens in flight, decode by streams and KV use (`least_loaded`)."""

    name = "least_loaded"
    needs_tokens = False
    reasons: ClassVar[tuple[str, ...]] = (LEAST_LOADED,)

    def __init__(self, burden: Burden) -> None:
        self._burden = burden

    def choose(self, candidates: Sequence[W], ask: RoutingRequest) -> Choice[W]:
        return Choice(self._burden.least(candidates), LEAST_LOADED)

    def routed(self, worker: RoutingCandidate, ask: RoutingRequest) -> None:
        """The load figures know."""

    def forget(self, name: str) -> None:
        self._burden.forget(name)

    def matched(self, worker: RoutingCandidate, ask: RoutingRequest) -> int:
        return 0


POWER_OF_TWO: Final = "power_of_two"


class PowerOfTwo:
    """Send to the less loaded of two at random (`power_of_two`).

    Nearly as even as least_loaded, without its herd: where several proxies see load figures that are a moment old, they
    do not all send to the same worker.
    """

    name = "power_of_two"
    needs_tokens = False
    reasons: ClassVar[tuple[str, ...]] = (POWER_OF_TWO,)

    def __init__(self, burden: Burden, random: Random) -> None:
        self._burden = burden
        self._random = random

    def choose(self, candidates: Sequence[W], ask: RoutingRequest) -> Choice[W]:
        count = len(candidates)
        first = int(self._random.random() * count)
        if count == 1:
            return Choice(candidates[0], POWER_OF_TWO)
        second = int(self._random.random() * (count - 1))
        candidate, other = candidates[first], candidates[second + (second >= first)]
        return Choice(other if self._burden.of(other) < self._burden.of(candidate) else candidate, POWER_OF_TWO)

    def routed(self, worker: RoutingCandidate, ask: RoutingRequest) -> None:
        """The load figures know."""

    def forget(self, name: str) -> None:
        self._burden.forget(name)

    def matched(self, worker: RoutingCandidate, ask: RoutingRequest) -> int:
        return 0


class RecentBlocks:
    """Names of blocks (routing.chain), in two halves. What is used is in the newer half; when that is full it becomes
    the older one, and what was only in the older one is forgotten. The names of a prompt are put in together: all
    blocks before a known one are known. That costs one call for a prompt, where an order of single names would cost two
    look-ups and a move for each.
    """

    __slots__ = ("_half", "_keeps_older", "_newer", "_older")

    def __init__(self, most: int) -> None:
        """Keep at most so many blocks, at least 1."""
        self._half = max(1, most // 2)
        self._keeps_older = most > 1
        self._newer: set[int] = set()
        self._older: set[int] = set()

    def __contains__(self, name: object) -> bool:
        return name in self._newer or name in self._older

    def __len__(self) -> int:
        """Different names."""
        return len(self._newer | self._older)

    def use(self, names: list[int]) -> None:
        """A prompt's, from its beginning on. Of one that does not fit into a half, the beginning is kept."""
        half = self._half
        if len(names) > half:
            names = names[:half]
        newer = self._newer
        if len(newer) + len(names) > half and len(newer) + len(set(names).difference(newer)) > half:
            self._older = newer if self._keeps_older else set()
            newer = self._newer = set()
        newer.update(names)


class PrefixAware:
    """Send to the worker that was sent the longest beginning of this prompt (`prefix_aware`).

    An approximation on three counts: it knows what this process sent, not what an engine still holds; it compares the
    bytes of the request, not tokens; and it forgets by its own rule. Only load figures are shared between proxy
    processes, so with several of them session affinity, which all agree on, keeps more of the cache.
    """

    name = "prefix_aware"
    needs_tokens = False
    reasons: ClassVar[tuple[str, ...]] = BY_MATCH

    def __init__(self, burden: Burden, settings: PrefixSettings) -> None:
        self._burden = burden
        self._block_bytes = settings.block_bytes
        self._max_blocks = settings.max_blocks
        self._min_match_ratio = float(settings.min_match_ratio)
        self._sent: dict[str, RecentBlocks] = {}

    def choose(self, candidates: Sequence[W], ask: RoutingRequest) -> Choice[W]:
        chain = ask.prompt_chain(self._block_bytes)
        held = [self._held(candidate.name, chain, ask) for candidate in candidates]
        return by_match(candidates, held, self._burden, ask, self._min_match_ratio)

    def routed(self, worker: RoutingCandidate, ask: RoutingRequest) -> None:
        sent = self._sent.get(worker.name)
        if sent is None:
            sent = self._sent[worker.name] = RecentBlocks(self._max_blocks)
        sent.use(ask.prompt_chain(self._block_bytes).names)

    def forget(self, name: str) -> None:
        self._sent.pop(name, None)
        self._burden.forget(name)

    def matched(self, worker: RoutingCandidate, ask: RoutingRequest) -> int:
        return self._held(worker.name, ask.prompt_chain(self._block_bytes), ask)

    @property
    def blocks(self) -> int:
        """Remembered now, of all workers."""
        return sum(len(sent) for sent in self._sent.values())

    def _held(self, name: str, chain: GrowingChain, ask: RoutingRequest) -> int:
        """Prompt tokens that the worker of that name was sent."""
        sent = self._sent.get(name)
        held = chain.held(sent) if sent is not None else 0
        return ask.estimate * held // chain.length if held else 0


NO_TOKENS: Final = "no_tokens"  # the token ids are not known: the least loaded


class KvEvents:
    """Send to the worker whose KV cache holds most of the prompt, exactly, by token ids (`kv_events`).

    Without token ids it has no opinion and says so ("no_tokens"): it never compares text. Events arrive some
    milliseconds after a block is full, so a burst of the same new prompt is spread by load.
    """

    name = "kv_events"
    needs_tokens = True
    reasons: ClassVar[tuple[str, ...]] = (*BY_MATCH, NO_TOKENS)

    def __init__(self, burden: Burden, settings: KvEventsSettings) -> None:
        self._burden = burden
        self._min_match_ratio = float(settings.min_match_ratio)
        self.index = KvIndex(settings.max_blocks)
        self.replay_timeout_seconds = float(settings.replay_timeout_seconds)
        """For who feeds the index."""

    def choose(self, candidates: Sequence[W], ask: RoutingRequest) -> Choice[W]:
        if ask.tokens is None:
            return Choice(self._burden.least(candidates), NO_TOKENS)
        held = [self.matched(candidate, ask) for candidate in candidates]
        return by_match(candidates, held, self._burden, ask, self._min_match_ratio)

    def routed(self, worker: RoutingCandidate, ask: RoutingRequest) -> None:
        """The worker's events will show what it kept."""

    def forget(self, name: str) -> None:
        self.index.forget(name)
        self._burden.forget(name)

    def matched(self, worker: RoutingCandidate, ask: RoutingRequest) -> int:
        return max(self.index.matched(worker.name, ask).values(), default=0)

    def rank(self, worker: RoutingCandidate, ask: RoutingRequest) -> int | None:
        """The data parallel rank that holds most of the prompt; None when none holds any of it."""
        held = self.index.matched(worker.name, ask)
        rank = max(held, key=held.__getitem__, default=None)
        return rank if rank is not None and held[rank] else None


_MASK: Final = (1 << 64) - 1
SESSION: Final = "session"  # the session's own worker
SESSION_SPILLED: Final = "session_spilled"  # that one is too busy: the session's next


class Affinity:
    """Send the requests of one session to the same worker; around any policy, which decides for those without.

    By rendezvous hashing: every worker has a score for a session, and the highest one is the session's home. Nothing is
    remembered, so there is nothing to bound or to expire, several proxy processes and a restarted proxy agree, and when
    a worker leaves only its own sessions move; they return when it does. While the home is too busy a request goes to
    the session's next worker, always the same one, and returns home as soon as that is no longer too busy: the home's
    cache still has most of the session, and staying would need a memory that other processes do not share.

    The price: the spread of few sessions over few workers is as uneven as chance, until the load guard evens it out.
    """

    def __init__(self, inner: Policy, burden: Burden) -> None:
        self.inner = inner
        self._burden = burden
        self._hashes: dict[str, int] = {}

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def needs_tokens(self) -> bool:
        return self.inner.needs_tokens

    @property
    def reasons(self) -> tuple[str, ...]:
        return (*self.inner.reasons, SESSION, SESSION_SPILLED)

    def choose(self, candidates: Sequence[W], ask: RoutingRequest) -> Choice[W]:
        if ask.session is None:
            return self.inner.choose(candidates, ask)
        session = _hash(ask.session)
        home = max(candidates, key=lambda worker: self._score(session, worker))
        calmest = candidates[self._burden.calmest(candidates)]
        if not self._burden.too_busy(home, calmest):
            return Choice(home, SESSION)
        # Never empty: no worker is too busy in comparison with itself.
        calm = [worker for worker in candidates if not self._burden.too_busy(worker, calmest)]
        return Choice(max(calm, key=lambda worker: self._score(session, worker)), SESSION_SPILLED)

    def routed(self, worker: RoutingCandidate, ask: RoutingRequest) -> None:
        self.inner.routed(worker, ask)

    def forget(self, name: str) -> None:
        self._hashes.pop(name, None)
        self.inner.forget(name)

    def matched(self, worker: RoutingCandidate, ask: RoutingRequest) -> int:
        return self.inner.matched(worker, ask)

    def _score(self, session: int, worker: RoutingCandidate) -> int:
        known = self._hashes.get(worker.name)
        if known is None:
            known = self._hashes[worker.name] = _hash(worker.name)
        # The finalizer of splitmix64: without it scores would only differ in the bits in which the names do.
        mixed = session ^ known
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return mixed ^ (mixed >> 31)


def _hash(text: str) -> int:
    """Return a hash that is equal in every process, unlike Python's."""
    return int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "little")
