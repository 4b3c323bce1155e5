"""Whether the engines counted what the client was answered: each check is a pure function of the evidence."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.bench.answers import Answer, Invalid, Unknown
from pdserve.bench.evidence import Evidence

COLD_CACHE = "cold-cache"
TOLERANCE = 0.05
"""Share by which the engines' counts and the client's may differ."""
_EACH = 2
"""Tokens of every request by which they may differ too: the last of a prompt that was cached whole is computed anyway,
and prefill generates one."""
WARM_SHARE = 0.5
"""Of all prompt tokens. Every run has the same prompts (one seed): without an effect of the salt nearly all blocks
would come from a cache. Random prompts of one run share blocks with each other where the vocabulary is small: 13 % with
that of recipes/tiny-cpu.yaml and 32 prompts."""
_SOURCES = ("computed", "local_hits", "received")


def tokens_differ(evidence: Evidence) -> Answer:
    """Prompts by where their tokens came from on prefill, and answers as decode generated them. More than the client
    knows of is work for somebody else that went straight to the engines; less is a client that claims too much."""
    if not evidence.done:
        return None  # which is INVALID already
    if unread := [name for name in evidence.names("prefill", "decode", "aggregated") if not evidence.counted_by(name)]:
        return Unknown(f"what {', '.join(unread)} counted is not known")
    proxy = evidence.proxy()
    if evidence.plan.proxy.routing.conditional is not None and proxy.get("single_engine", 1.0) > 0:
        first: Sequence[str] = ()  # prompts that went to decode alone are not prefill's
    else:
        first = ("prefill", "aggregated")
    prompts = sum(record.prompt_tokens for record in evidence.done)
    answers = sum(record.output_tokens for record in evidence.done)
    # What engines did for requests without an answer, and for attempts that failed, is not known: up to all of it.
    lost = len(evidence.records) - len(evidence.done) + proxy.get("failovers", 0.0)
    lost += max(0.0, evidence.load.requests - len(evidence.records)) if evidence.client_problem else 0.0
    # A request that was preempted begins anew, and may be counted anew.
    lost += evidence.engines("prefill", "decode", "aggregated").get("preemptions", 0.0)
    longest = max((record.output_tokens for record in evidence.done), default=0)
    counts = (
        ("prompt", first, _SOURCES, prompts, lost * evidence.longest_prompt),
        ("prompt", ("decode",), _SOURCES, prompts, lost * evidence.longest_prompt),
        ("answer", ("decode", "aggregated"), ("generated",), answers, lost * longest),
    )
    unknown: Unknown | None = None
    for what, roles, names, told, more in counts:
        if not evidence.names(*roles):
            continue
        counted = [evidence.engines(*roles).get(name) for name in names]
        known = [count for count in counted if count is not None]
        if not known or (what == "prompt" and counted[0] is None):
            unknown = unknown or Unknown(f"the {' and '.join(roles)} engines do not count {what} tokens")
            continue
        slack = TOLERANCE * told + _EACH * len(evidence.records)
        if not told - slack <= sum(known) <= told + slack + more:
            return Invalid(
                f"the {' and '.join(evidence.names(*roles))} engines counted {sum(known):.0f} {what} tokens, and the"
                f" client knows of {told}"
            )
    return unknown


def cache_was_warm(evidence: Evidence) -> Answer:
    """Each run of the client has a `cache_salt` of its own (pdserve.bench.clients), by which vLLM and LMCache key a
    block: what was there before cannot be loaded, also where it could not be removed (pdserve.sweep.empty). A trace
    repeats itself, which a cold cache has too; the limit is of the rest."""
    prefill, decode = evidence.engines("prefill", "aggregated"), evidence.engines("decode")
    if "computed" not in prefill or "local_hits" not in prefill:
        return Unknown("the engines do not count where the tokens of their prompts came from")
    if not evidence.done:
        return None
    # What prefill received came from a cache tier; what decode received is the transfer itself.
    on_prefill = prefill["local_hits"] + prefill.get("received", 0.0)
    # The prompt of a session's next turn may be in both.
    warm = max(on_prefill, decode.get("local_hits", 0.0))
    asked = sum(record.prompt_tokens if record.ok else evidence.longest_prompt for record in evidence.records)
    theory = evidence.theory
    if warm <= (theory + WARM_SHARE * (1 - theory)) * asked:
        return None
    new = "whose prompts were all new" if not theory else f"and {theory:.0%} repeat earlier ones of the trace"
    return Invalid(f"{warm:.0f} of {asked} prompt tokens came from a cache, {new}: it was not cold")
