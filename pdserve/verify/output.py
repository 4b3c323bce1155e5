"""Proof `output`: what comes through the deployment is what one instance alone computes."""

from __future__ import annotations

from pdserve.verify.outcome import Outcome, failed, proven
from pdserve.verify.prompts import altered
from pdserve.verify.reference import force, generate
from pdserve.verify.report import Numbers
from pdserve.verify.target import Target
from pdserve.verify.trials import Trial, Trials

CLAIM = (
    "Answers through the proxy equal those of one instance that computed the whole prompt itself, "
    "and another prompt gives another answer."
)


async def prove(target: Target, trials: Trials) -> Outcome:
    if target.plan.verify.output == "exact":
        return await _exact(target, trials)
    return await _logprobs(target, trials)


async def _exact(target: Target, trials: Trials) -> Outcome:
    numbers = _numbers(target, trials)
    equal = 0
    difference = ""
    for number, trial in enumerate(trials.trials):
        alone = await generate(target, trial.prompt, f"reference-{number}")
        if alone.tokens == trial.answer.tokens:
            equal += 1
        elif not difference:
            difference = first_difference(f"prompt {number}", trial.answer.tokens, alone.tokens)
    numbers["equal answers"] = equal
    control = await generate(target, _control_prompt(target, trials), "control")
    changed = sum(a != b for a, b in zip(control.tokens, trials.trials[0].answer.tokens, strict=False))
    numbers["control: tokens that differ"] = changed
    if difference:
        return failed(f"{difference}. {where_to_look(target)}", numbers)
    if not changed:
        return failed(INSENSITIVE, numbers)
    return proven(numbers)


async def _logprobs(target: Target, trials: Trials) -> Outcome:
    numbers = _numbers(target, trials)
    tolerance = target.plan.verify.logprob_tolerance
    numbers["tolerance"] = tolerance
    differences: list[float] = []
    for number, trial in enumerate(trials.trials):
        if len(trial.answer.logprobs) != len(trial.answer.tokens):
            return failed("the proxy's answer carries no logprobs although they were asked for", numbers)
        differences += await against(target, trial, trial.prompt, f"reference-{number}")
    numbers["max |logprob difference|"] = round(max(differences), 6)
    numbers["mean |logprob difference|"] = round(sum(differences) / len(differences), 6)
    control = await against(target, trials.trials[0], _control_prompt(target, trials), "control")
    numbers["control: max |difference|"] = round(max(control), 6)
    if max(differences) > tolerance:
        return failed(
            f"logprobs differ by up to {max(differences):.4f}, allowed are {tolerance:g}. {where_to_look(target)}",
            numbers,
        )
    if max(control) <= tolerance:
        return failed(INSENSITIVE, numbers)
    return proven(numbers)


async def against(target: Target, trial: Trial, prompt: tuple[int, ...], leg: str) -> list[float]:
    forced = await force(target, prompt, trial.answer.tokens, leg)
    return [abs(a - b) for a, b in zip(forced.chosen, trial.answer.logprobs, strict=True)]


def _control_prompt(target: Target, trials: Trials) -> tuple[int, ...]:
    return altered(trials.trials[0].prompt, trials.trials[1].prompt, target.chunk)


def _numbers(target: Target, trials: Trials) -> Numbers:
    return {
        "compared": target.plan.verify.output,
        "prompts": len(trials.trials),
        "prompt tokens": len(trials.trials[0].prompt),
        "output tokens": len(trials.trials[0].answer.tokens),
        "reference": target.reference.name,
    }


def first_difference(label: str, through: tuple[int, ...], alone: tuple[int, ...]) -> str:
    place = next((i for i, (a, b) in enumerate(zip(through, alone, strict=False)) if a != b), None)
    if place is None:
        return f"{label}: {len(through)} tokens came through the proxy, {len(alone)} from the reference"
    return (
        f"{label}: output token {place} is {through[place]} through the proxy "
        f"and {alone[place]} from one instance alone"
    )


INSENSITIVE = (
    "another first chunk of the prompt does not change the answer: this model hardly looks at its context (dummy "
    "weights?), so equal answers prove nothing"
)


def where_to_look(target: Target) -> str:
    if not target.decoders:
        return "Both answers come from aggregated engines: are their weights and arguments the same?"
    logs = ", ".join(target.log(worker.name) for worker in target.decoders)
    return f"Decode worked on other KV than prefill computed, or the roles run other weights or dtypes: see {logs}"
