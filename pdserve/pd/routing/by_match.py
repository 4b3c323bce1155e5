"""The choice by who holds most of the prompt, shared by the approximate and the exact policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdserve.pd.routing.ask import Ask
from pdserve.pd.routing.burden import Burden
from pdserve.pd.routing.policy import Candidate, Choice, W


def by_match(
    candidates: Sequence[W],
    burden: Burden,
    ask: Ask,
    matched: Callable[[Candidate, Ask], int],
    min_ratio: float,
) -> Choice[W]:
    """The least loaded of those that hold most of the prompt, unless that is too little of it, or they are too busy."""
    best: list[W] = []
    most = 0
    for candidate in candidates:
        held = matched(candidate, ask)
        if held > most:
            best, most = [candidate], held
        elif held and held == most:
            best.append(candidate)
    if not best or most < min_ratio * ask.estimate:
        return Choice(burden.least(candidates), "no_match")
    if len(best) < len(candidates):
        calmest = min(candidates, key=burden.of)
        if calmest not in best:
            saved = most - matched(calmest, ask)
            if burden.too_busy(min(best, key=burden.of), calmest, saved=saved):
                return Choice(burden.least(candidates), "overloaded")
    return Choice(burden.least(best), "match")
