"""Proof `transfer`: decode got every prompt by KV transfer."""

from __future__ import annotations

from pdserve.verify.outcome import Outcome, failed, not_proven, proven
from pdserve.verify.report import Numbers
from pdserve.verify.target import Target
from pdserve.verify.trials import Trials

CLAIM = "Decode received the KV of every prompt and computed none of it beyond what vLLM always recomputes."
_DETAILS_FLAG = "--enable-prompt-tokens-details"
_ALWAYS_RECOMPUTED = 1
"""vLLM needs the last prompt token's logits. 0.32.0 counts it as received all the same (619 of 619), connectors that
leave it out report one less; hybrid models load one token less."""


async def prove(target: Target, trials: Trials) -> Outcome:
    """The usage of an answer comes from decode. The salt was new, so decode's own prefix cache cannot be the source:
    what is cached came from prefill."""
    length = len(trials.trials[0].prompt)
    numbers: Numbers = {"prompts": len(trials.trials), "prompt tokens": length}
    cached = [trial.answer.cached_tokens for trial in trials.trials]
    for worker in target.producers:
        numbers[f"{worker.name}: tokens computed"] = trials.computed(worker.name)
    for worker in target.decoders:
        numbers[f"{worker.name}: tokens received"] = trials.received(worker.name)
    if all(one is None for one in cached) and not _details_enabled(target):
        return not_proven(
            f"the engines were started without {_DETAILS_FLAG}, so answers do not say what was computed", numbers
        )
    computed = [trial.answer.prompt_tokens - (trial.answer.cached_tokens or 0) for trial in trials.trials]
    numbers["received of the prompt (least)"] = min(one or 0 for one in cached)
    numbers["computed on decode (most)"] = max(computed)
    if max(computed) > _ALWAYS_RECOMPUTED:
        worst = computed.index(max(computed))
        logs = ", ".join(target.log(w.name) for w in (*target.decoders, *target.producers))
        return failed(
            f"decode computed {computed[worst]} of the {trials.trials[worst].answer.prompt_tokens} tokens of prompt "
            f"{worst} itself: its KV was not transferred, or not all of it; see {logs}",
            numbers,
        )
    return proven(numbers)


def _details_enabled(target: Target) -> bool:
    """Older engines leave the details out when nothing was cached: then null means 0."""
    return all(_DETAILS_FLAG in target.plan.process(worker.name).argv for worker in target.decoders)
