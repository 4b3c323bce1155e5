"""The fabric check over the probes of all nodes: all waiting ends begin, then rounds of transfers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Protocol, TypeVar

from pdserve.plan.model import Plan
from pdserve.preflight.fabric.ends import Sent, WaitingEnd
from pdserve.preflight.fabric.judge import judge_end, judge_path, judge_rails, judge_untried
from pdserve.preflight.fabric.paths import (
    MOST_ROUNDS,
    Path,
    Wish,
    by_rails,
    find_not_reached,
    find_untried,
    paths,
    rounds,
)
from pdserve.preflight.finding import Finding, failed
from pdserve.preflight.nodes.node_probe import Answer, HasSent, Question, Send, Wait, Waits

AnswerT = TypeVar("AnswerT", bound=Answer)


class FabricProbe(Protocol):
    """A probe, as far as it is needed here."""

    async def ask(self, question: Question, kind: type[AnswerT]) -> AnswerT: ...


async def try_fabric(
    probes: Mapping[str, FabricProbe], plan: Plan, wish: Wish, reached: Sequence[Finding]
) -> list[Finding]:
    """`reached`: whether the nodes reach each other at all; where they do not, the transfers would only repeat it.
    Raises PreflightError when a probe does not answer."""
    if failed(reached):
        return [find_not_reached()]
    if (untried := find_untried(plan)) is not None:
        return [untried]
    wanted = by_rails(paths(plan)) if wish.rails else list(paths(plan))
    waiting: dict[str, dict[_Place, Path]] = {}
    for path in wanted:
        waiting.setdefault(path.waiting.node, {})[_place(path)] = path
    begun = await asyncio.gather(*(_begin(probes[node], here, wish.python) for node, here in waiting.items()))
    findings, there = [], dict[_Place, WaitingEnd]()
    for path, answer in chain.from_iterable(begun):
        if answer.waiting is not None:
            there[_place(path)] = answer.waiting
        elif answer.failure is not None:
            findings.append(judge_end(path.waiting, answer.failure))
    in_rounds = rounds([path for path in wanted if _place(path) in there])
    done = [
        (path, sent)
        for some in in_rounds[:MOST_ROUNDS]
        for path, sent in await _round(probes, some, there, wish.python)
    ]
    for path, sent in done:
        findings += judge_path(path, there[_place(path)], sent, min_gbps=wish.min_gbps)
    tried = sum(map(len, in_rounds[:MOST_ROUNDS]))
    return [*findings, *judge_rails(done), *judge_untried(tried, sum(map(len, in_rounds)))]


_Place = tuple[str, str]


def _place(path: Path) -> _Place:
    """Of the waiting end: there is one for each device that is tried by itself."""
    return path.waiting.node, path.waiting.devices


async def _begin(probe: FabricProbe, here: Mapping[_Place, Path], python: str | None) -> list[tuple[Path, Waits]]:
    """All waiting ends of a node; a probe answers one question at a time."""
    return [
        (path, await probe.ask(Wait(end=path.waiting, is_read=path.reads, python=python), Waits))
        for path in here.values()
    ]


async def _round(
    probes: Mapping[str, FabricProbe], some: Sequence[Path], there: Mapping[_Place, WaitingEnd], python: str | None
) -> list[tuple[Path, Sent]]:
    answers = await asyncio.gather(
        *(
            probes[path.caller.node].ask(Send(path=path, to=there[_place(path)], python=python), HasSent)
            for path in some
        )
    )
    return [(path, answer.sent) for path, answer in zip(some, answers, strict=True)]
