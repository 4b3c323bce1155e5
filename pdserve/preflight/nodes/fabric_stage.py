"""The fabric check over the probes of all nodes: all waiting ends begin, then rounds of transfers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from pdserve.plan.model import Plan
from pdserve.preflight.fabric.ends import WaitingEnd
from pdserve.preflight.fabric.judge import judge_end, judge_path, judge_untried
from pdserve.preflight.fabric.paths import MOST_ROUNDS, Path, Wish, find_not_reached, find_untried, paths, rounds
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
    wanted = paths(plan)
    waiting = {path.waiting.node: (path.waiting, path.reads) for path in wanted}
    begun = await asyncio.gather(
        *(
            probes[name].ask(Wait(end=end, is_read=is_read, python=wish.python), Waits)
            for name, (end, is_read) in waiting.items()
        )
    )
    findings, there = [], dict[str, WaitingEnd]()
    for (end, _), answer in zip(waiting.values(), begun, strict=True):
        if answer.waiting is not None:
            there[end.node] = answer.waiting
        elif answer.failure is not None:
            findings.append(judge_end(end, answer.failure))
    in_rounds = rounds([path for path in wanted if path.waiting.node in there])
    for some in in_rounds[:MOST_ROUNDS]:
        findings += await _round(probes, some, there, wish)
    tried = sum(map(len, in_rounds[:MOST_ROUNDS]))
    return [*findings, *judge_untried(tried, sum(map(len, in_rounds)))]


async def _round(
    probes: Mapping[str, FabricProbe], some: Sequence[Path], there: Mapping[str, WaitingEnd], wish: Wish
) -> list[Finding]:
    answers = await asyncio.gather(
        *(
            probes[path.caller.node].ask(Send(path=path, to=there[path.waiting.node], python=wish.python), HasSent)
            for path in some
        )
    )
    return [
        finding
        for path, answer in zip(some, answers, strict=True)
        for finding in judge_path(path, there[path.waiting.node], answer.sent, min_gbps=wish.min_gbps)
    ]
