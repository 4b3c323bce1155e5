"""Proof `load-output`: answers under load are those of one engine alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.verify.load.options import GROUPS
from pdserve.verify.load.schedule import Schedule
from pdserve.verify.load.traffic import Traffic
from pdserve.verify.load.windows import when
from pdserve.verify.outcome import Outcome, failed, not_proven, proven
from pdserve.verify.output import INSENSITIVE, against, first_difference, where_to_look
from pdserve.verify.prompts import altered
from pdserve.verify.reference import generate
from pdserve.verify.report import Numbers
from pdserve.verify.target import Target
from pdserve.verify.trials import Trial

CLAIM = (
    "A sample of the answers under load equals those of one instance that computed each whole prompt itself, "
    "and another prompt gives another answer."
)


@dataclass
class ComparedAnswers:
    """Numbers of the requests whose answers were compared, and of those that differ."""

    compared: list[int] = field(default_factory=list)
    different: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Distance:
    """How far an answer is from what the reference computes of a prompt."""

    differs: bool
    size: float
    """Differing tokens, or the largest difference of a logprob."""
    text: str


async def prove(target: Target, schedule: Schedule, traffic: Traffic, comparison: ComparedAnswers) -> Outcome:
    """Fills `comparison` as it goes. The reference is asked once the load is over, one prompt after the other."""
    trials = {
        request.planned.number: Trial(request.planned.prompt, target.salt(request.planned.leg), request.answer)
        for request in traffic.served
        if request.planned.compared and request.answer is not None
    }
    if not trials:
        return not_proven("no answer was there to compare: a longer load, or a larger --sample, has some")
    verify = target.plan.verify
    numbers: Numbers = {"compared": verify.output, "reference": target.reference.name, "answers compared": len(trials)}
    if verify.output == "logprobs":
        numbers["tolerance"] = verify.logprob_tolerance
    first, largest = "", 0.0
    for number, trial in trials.items():
        distance = await _distance(target, trial, trial.prompt, f"load-reference-{number}")
        comparison.compared.append(number)
        largest = max(largest, distance.size)
        if distance.differs:
            comparison.different.append(number)
            first = first or f"request {number}: {distance.text}"
    different = comparison.different
    numbers["answers that differ"] = len(different)
    numbers["share that differs"] = round(len(different) / len(trials), 4)
    numbers["largest difference"] = round(largest, 6)
    control = await _control(target, schedule, trials)
    numbers["control: difference"] = round(control.size, 6)
    if different:
        return failed(
            f"{len(different)} of {len(trials)} compared answers differ from one instance alone "
            f"({when(traffic, comparison.compared, different)}). The first is {first}. {where_to_look(target)}",
            numbers,
        )
    if not control.differs:
        return failed(INSENSITIVE, numbers)
    return proven(numbers)


async def _control(target: Target, schedule: Schedule, trials: dict[int, Trial]) -> _Distance:
    """The shortest prompt with the first chunk of another group: its answer must be another one."""
    shortest = min(trials.values(), key=lambda trial: len(trial.prompt))
    other = next(
        prefix
        for prefix in map(schedule.prefix, range(GROUPS))
        if prefix[: target.chunk] != shortest.prompt[: target.chunk]
    )
    return await _distance(target, shortest, altered(shortest.prompt, other, target.chunk), "load-control")


async def _distance(target: Target, trial: Trial, prompt: tuple[int, ...], leg: str) -> _Distance:
    """From the answer of `trial` to what the reference makes of `prompt`."""
    verify = target.plan.verify
    if verify.output == "exact":
        alone = await generate(target, prompt, leg)
        size = sum(a != b for a, b in zip(trial.answer.tokens, alone.tokens, strict=False))
        return _Distance(
            differs=trial.answer.tokens != alone.tokens,
            size=size,
            text=first_difference(f"{len(prompt)} prompt tokens", trial.answer.tokens, alone.tokens),
        )
    if len(trial.answer.logprobs) != len(trial.answer.tokens):
        return _Distance(differs=True, size=0.0, text="the answer has no logprobs although they were asked for")
    largest = max(await against(target, trial, prompt, leg))
    return _Distance(
        differs=largest > verify.logprob_tolerance,
        size=largest,
        text=f"logprobs differ by up to {largest:.4f}, allowed are {verify.logprob_tolerance:g}",
    )
