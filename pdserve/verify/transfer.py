"""Proof `transfer`: decode got every prompt by KV transfer."""

from __future__ import annotations

from pdserve.verify.outcome import Outcome, failed, not_proven, proven
from pdserve.verify.report import Numbers
from pdserve.verify.target import Target
from pdserve.verify.trials import Trials

CLAIM = "Decode received the KV of every prompt and computed none of it beyond what vLLM always recomputes."
ALWAYS_RECOMPUTED = 1
"""vLLM needs the last prompt token's logits. 0.32.0 counts it as received all the same (619 of 619), connectors that
leave it out report one less; hybrid models load one token less."""


async def prove(target: Target, trials: Trials) -> Outcome:
    """From the counters of the decode engines: what an answer's usage calls cached is what prefill had in a cache. The
    salt was new, so decode's own prefix cache cannot be the source. Requests of others count too: beside traffic that
    does not go through prefill the proof can fail, never hold by mistake for them alone."""
    prompts = [trial.answer.prompt_tokens for trial in trials.trials]
    numbers: Numbers = {"prompts": len(prompts), "prompt tokens": len(trials.trials[0].prompt)}
    received = [trials.received(worker.name) for worker in target.decoders]
    computed = [trials.computed(worker.name) for worker in target.decoders]
    for worker in target.producers:
        numbers[f"{worker.name}: tokens computed"] = trials.computed(worker.name)
    for worker, tokens in zip(target.decoders, received, strict=True):
        numbers[f"{worker.name}: tokens received"] = tokens
    got, own = [count for count in received if count is not None], [count for count in computed if count is not None]
    if len(got) < len(received) or len(own) < len(computed):
        return not_proven(
            "the decode engines do not count where the tokens of their prompts came from, or could not be read", numbers
        )
    numbers["received by decode"], numbers["computed on decode"] = sum(got), sum(own)
    allowed = ALWAYS_RECOMPUTED * len(prompts)
    if sum(got) < sum(prompts) - allowed or sum(own) > allowed:
        logs = ", ".join(target.log(w.name) for w in (*target.decoders, *target.producers))
        return failed(
            f"decode received {sum(got)} of {sum(prompts)} prompt tokens and computed {sum(own)} itself: KV was not "
            f"transferred, or not all of it; see {logs}",
            numbers,
        )
    return proven(numbers)
