"""The hit rate of an L1 by its size, and the smallest size that gets near the best. What was replayed is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdserve.plan.frozen import Frozen
from pdserve.recipe.sections.lmcache import Eviction, Lmcache
from pdserve.sizing.findings import Crossing
from pdserve.sizing.given import GIB, Span

NEAR = 0.99
"""Of the best hit rate: what is called near it."""
_LEAST_GAIN = 0.01
"""Of the tokens, from which a larger L1 is worth a warning; and a hit rate below it is none."""
_DIGITS = 2
"""Of a size that is proposed."""


class HitRate(Frozen):
    """Of one size."""

    l1_gib: float
    rate: Span
    """Share of the looked-up tokens, from an L1 that is as empty as right after an eviction to one that is full to its
    watermark."""


class HitRates(Frozen):
    """Of one server's log of lookups."""

    server: str
    """The folder of its log."""
    source: str
    """Of the rates."""
    model: str
    requests: int
    tokens: int
    chunks: int
    """Different ones."""
    best: float
    """With room for all of them."""
    sizes: tuple[HitRate, ...]
    """Ascending."""
    now: HitRate
    """With the size of the recipe."""
    enough_gib: float | None
    """The smallest of `sizes` that is near the best; None: nothing repeats."""
    notes: tuple[str, ...]


def held(eviction: Eviction) -> tuple[float, float]:
    """Shares of L1 that hold chunks: right after an eviction, and right before one.

    LMCache looks once a second whether L1 is full to the watermark, and takes then `ratio` of the chunks in it, not of
    L1 (lmcache 0.5.6, v1/distributed: L1EvictionController, LRUEvictionPolicy). Within that second it may get fuller.
    """
    return eviction.watermark * max(1 - eviction.ratio, 0.1), eviction.watermark


def enough(sizes: Sequence[HitRate], best: float) -> float | None:
    """GiB, rounded up to what one would write."""
    near = next((size.l1_gib for size in sizes if size.rate.low >= NEAR * best), None)
    return None if near is None or best < _LEAST_GAIN else rounded_up(near)


def rounded_up(gib: float) -> float:
    """To two digits: 0.0731 to 0.074, 371 to 380."""
    exponent = int(f"{gib:e}".partition("e")[2]) - _DIGITS + 1
    step = 10.0**exponent
    low = int(gib / step * (1 + 1e-9)) * step
    return round(low if low >= gib * (1 - 1e-9) else low + step, max(0, -exponent))


def notes_of(section: Lmcache, warnings: Sequence[str]) -> tuple[str, ...]:
    """What the rates do not count."""
    notes = ["KV that an engine holds itself counts as looked up: it is part of these hits, and needs no L1"]
    if section.eviction.policy != "LRU":
        notes.append(f"the recipe evicts by {section.eviction.policy}, the simulator by LRU")
    if section.l2:
        notes.append("lmcache.l2 is not simulated: what L1 misses may be a hit there")
    notes.extend(f"the simulator warns: {text}" for text in list(dict.fromkeys(warnings))[:3])
    return tuple(notes)


def crossings_of(rates: HitRates) -> Iterator[Crossing]:
    """An L1 that misses what a larger one would hit."""
    if rates.enough_gib is None:
        return
    gain = rates.best - rates.now.rate.high
    if rates.now.rate.high < NEAR * rates.best and gain >= _LEAST_GAIN:
        yield Crossing(
            severity="warning",
            where="lmcache.l1_size_gb",
            what=f"with {rates.now.l1_gib:g} GiB {rates.now.rate.high:.1%} of the tokens in {rates.server} are hits at "
            f"most, with room for all {rates.best:.1%} ({rates.source})",
            todo=f"write lmcache.l1_size_gb: {rates.enough_gib:g}, if the host has the memory",
        )


def size_in_bytes(section: Lmcache) -> float:
    """Of L1."""
    return section.l1_size_gb * GIB
