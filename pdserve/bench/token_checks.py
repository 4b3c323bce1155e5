"""Whether the engines counted what the client was answered: each check is a pure function of the evidence."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.bench.answers import Answer, Invalid, Unknown
from pdserve.bench.client_checks import TEMPLATE_TOKENS
from pdserve.bench.evidence import Evidence
from pdserve.bench.records import RequestRecord

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
    """Prompts by where their tokens came from on prefill and on decode, and answers as decode generated them. More than
    the client knows of is work for somebody else that went straight to the engines; less is a client that claims too
    much."""
    if not evidence.done:
        return None  # which is INVALID already
    if unread := [name for name in evidence.names("prefill", "decode", "aggregated") if not evidence.counted_by(name)]:
        return Unknown(f"what {', '.join(unread)} counted is not known")
    prompts, answers = _Tokens("prompt", _SOURCES), _Tokens("answer", ("generated",))
    counts: list[tuple[_Tokens, tuple[str, ...]]] = [(prompts, ("decode",)), (answers, ("decode", "aggregated"))]
    unknown: Unknown | None = None
    if evidence.plan.proxy.routing.conditional is None or evidence.proxy().get("single_engine", 1.0) <= 0:
        counts.append((prompts, ("prefill", "aggregated")))
    else:
        unknown = Unknown("prompts may have gone to decode alone: how many tokens prefill should have is not known")
    for tokens, roles in counts:
        answer = _compared(evidence, tokens, roles) if evidence.names(*roles) else None
        if isinstance(answer, Invalid):
            return answer
        unknown = unknown or answer
    return unknown


@dataclass(frozen=True)
class _Tokens:
    what: str
    counters: tuple[str, ...]
    """Of the engines, which count them together. Of the first it is known that they count at all."""

    def of(self, record: RequestRecord) -> int:
        return record.prompt_tokens if self.what == "prompt" else record.output_tokens


def _compared(evidence: Evidence, tokens: _Tokens, roles: tuple[str, ...]) -> Invalid | Unknown | None:
    counted = evidence.engines(*roles)
    if tokens.counters[0] not in counted:
        return Unknown(f"the {' and '.join(evidence.names(*roles))} engines do not count {tokens.what} tokens")
    number = sum(counted.get(counter, 0.0) for counter in tokens.counters)
    known = [tokens.of(record) for record in evidence.done]
    told = sum(known)
    slack = TOLERANCE * told + _EACH * len(evidence.records)
    names = " and ".join(evidence.names(*roles))
    text = f"the {names} engines counted {number:.0f} {tokens.what} tokens, and the client knows of {told}"
    if number < told - slack:
        return Invalid(text)
    if number <= told + slack:
        return None
    # What engines did for requests without an answer, and for attempts that failed, is up to all of it.
    lost = len(evidence.records) - len(evidence.done) + evidence.proxy().get("failovers", 0.0)
    if evidence.workload.trace is not None and lost:
        return Unknown(f"{text}: the lengths of the {lost:.0f} that were not answered are not known")
    if number <= told + slack + lost * max(known):
        return None
    # vLLM 0.32 counts a prompt once, however often its request is preempted. Older versions were not looked at.
    if counted.get("preemptions", 0.0) and tokens.what == "prompt":
        return Unknown(f"{text}: of {counted['preemptions']:.0f} preemptions it is not known how they are counted")
    return Invalid(text)


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
    if evidence.workload.trace is not None:
        # Chat templates may begin every prompt with the same text, which is in no trace.
        warm = max(0.0, warm - TEMPLATE_TOKENS * len(evidence.records))
    if warm <= (theory + WARM_SHARE * (1 - theory)) * asked:
        return None
    new = "whose prompts were all new" if not theory else f"and {theory:.0%} repeat earlier ones of the trace"
    return Invalid(f"{warm:.0f} of {asked} prompt tokens came from a cache, {new}: it was not cold")
