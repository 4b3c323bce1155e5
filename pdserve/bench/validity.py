"""When the figures of a measurement do not count: each reason is a pure function of the evidence.

A check answers None (it holds), an Invalid, or an Unknown with what keeps it from being decided: an unknown is shown
beside the verdict, because a check that could not be made proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from pdserve.bench.evidence import Evidence
from pdserve.bench.reading import FAILED_TRANSFERS
from pdserve.plan.frozen import Frozen

PROMPT_TOLERANCE = 0.02
"""Share by which a prompt may differ from what was asked: text of random tokens is not always read back as the same
number of tokens."""
_PROMPT_TOKENS = 2
"""At least: a tokenizer adds a first token of its own."""
RECOMPUTED = 1
"""Prompt tokens that decode computes of every request: it needs the logits of the last token."""
SATURATED = 0.9
"""Share of the time in which the client's main thread ran or waited for a CPU. Above it, requests are sent late and
answers are read late, and the latencies are the client's."""
CLOCK_SECONDS = 0.5
"""By which two clocks may part: NTP moves the wall clock by less than half a millisecond a second."""
_LATE_SHARE, _LATE_SECONDS = 0.1, 1.0
"""By which the sending of all requests may take longer than their rate asks for."""
_FATAL_EVENTS = {
    "died": "died",
    "late": "was not ready in time",
    "given_up": "did not answer and counts as dead",
    "restarting": "is being restarted",
    "cache_down": "is down",
    "unresponsive": "did not answer",
    "agent_gone": "lost its agent",
}


@dataclass(frozen=True)
class Invalid:
    """The figures do not count."""

    text: str


@dataclass(frozen=True)
class Unknown:
    """It could not be checked."""

    text: str


Answer = Invalid | Unknown | None
Check = Callable[[Evidence], Answer]


class Reason(Frozen):
    """A check that did not hold, or that could not be made."""

    check: str
    text: str


class BenchVerdict(Frozen):
    """Whether the figures of a measurement count."""

    status: Literal["VALID", "INVALID"]
    reasons: tuple[Reason, ...] = ()
    unchecked: tuple[Reason, ...] = ()

    @property
    def valid(self) -> bool:
        return self.status == "VALID"


def judge(evidence: Evidence) -> BenchVerdict:
    """By every check, so that a user sees all reasons at once."""
    reasons, unchecked = [], []
    for name, check in CHECKS.items():
        answer = check(evidence)
        if isinstance(answer, Invalid):
            reasons.append(Reason(check=name, text=answer.text))
        elif isinstance(answer, Unknown):
            unchecked.append(Reason(check=name, text=answer.text))
    return BenchVerdict(status="INVALID" if reasons else "VALID", reasons=tuple(reasons), unchecked=tuple(unchecked))


def client_failed(evidence: Evidence) -> Answer:
    if evidence.client_problem:
        return Invalid(evidence.client_problem)
    if len(evidence.records) != evidence.load.requests:
        return Invalid(f"the client reports {len(evidence.records)} of {evidence.load.requests} requests")
    return None


def nothing_completed(evidence: Evidence) -> Answer:
    return None if evidence.done else Invalid("no request was answered with a token")


def too_many_errors(evidence: Evidence) -> Answer:
    failed = [record for record in evidence.records if not record.ok]
    if len(failed) <= evidence.workload.max_failed * len(evidence.records):
        return None
    errors = [record.error for record in failed if record.error]
    example = f", for example: {errors[0][:200]}" if errors else ""
    return Invalid(
        f"{len(failed)} of {len(evidence.records)} requests failed, and {evidence.workload.max_failed:.1%} may"
        f" (--max-failed){example}"
    )


def output_lengths(evidence: Evidence) -> Answer:
    """A stream that ends with an error event, or early, counts as answered for the client: its length gives it away."""
    asked = evidence.workload.output_tokens
    wrong = [record.output_tokens for record in evidence.done if record.output_tokens != asked]
    if not wrong:
        return None
    return Invalid(
        f"{len(wrong)} of {len(evidence.done)} answers have another length than the {asked} tokens that were asked for"
        f" ({min(wrong)} to {max(wrong)})"
    )


def prompt_lengths(evidence: Evidence) -> Answer:
    asked = evidence.workload.input_tokens
    allowed = max(_PROMPT_TOKENS, PROMPT_TOLERANCE * asked)
    wrong = [record.prompt_tokens for record in evidence.done if abs(record.prompt_tokens - asked) > allowed]
    if not wrong:
        return None
    return Invalid(
        f"{len(wrong)} of {len(evidence.done)} prompts have another length than the {asked} tokens that were asked for"
        f" ({min(wrong)} to {max(wrong)} as the server counts): the client's tokenizer is not the model's (--tokenizer)"
    )


def decode_computed(evidence: Evidence) -> Answer:
    """Only in prefill/decode. A proxy with `routing.conditional` sends prompts to decode alone by the recipe's wish."""
    if evidence.plan.mode != "disaggregated":
        return None
    if missing := _silent(evidence, "decode"):
        return missing
    computed = evidence.engines("decode").get("computed")
    if computed is None:
        return Unknown("the decode engines do not count where the tokens of their prompts came from")
    allowed: float = RECOMPUTED * len(evidence.records)
    if evidence.plan.proxy.routing.conditional is not None:
        alone = evidence.proxy().get("single_engine", 0)
        allowed += alone * evidence.workload.input_tokens * (1 + PROMPT_TOLERANCE)
    if computed <= allowed:
        return None
    share = computed / max(1, sum(record.prompt_tokens for record in evidence.records))
    return Invalid(
        f"decode computed {computed:.0f} prompt tokens itself ({share:.0%} of all), and {allowed:.0f} would be right:"
        " their KV was not transferred"
    )


def transfers_failed(evidence: Evidence) -> Answer:
    if evidence.plan.mode != "disaggregated":
        return None
    if missing := _silent(evidence, "prefill", "decode"):
        return missing
    counted = evidence.engines("prefill", "decode")
    failed = {name: int(counted[name]) for name in FAILED_TRANSFERS if counted.get(name, 0) > 0}
    if failed:
        return Invalid(", ".join(f"{count} {FAILED_TRANSFERS[name].title}" for name, count in failed.items()))
    if not _counts_failures(evidence, counted):
        return Unknown("the decode engines do not count transfers that fail: only recomputed prompts show them")
    return None


def cache_stored_nothing(evidence: Evidence) -> Answer:
    """Prompts that were computed and have a whole chunk must be stored by every tier that the recipe turns on."""
    computed = evidence.engines("prefill", "aggregated").get("computed")
    if computed is None:
        return Unknown("the engines do not count which prompt tokens they computed") if _tiers(evidence) else None
    for tier, (stored, chunk) in _tiers(evidence).items():
        whole = computed >= chunk and evidence.workload.input_tokens >= chunk
        if stored is None and whole:
            return Unknown(f"{tier} reports nothing of what it stored")
        if stored == 0 and whole:
            return Invalid(f"{tier} is on and stored nothing, while {computed:.0f} prompt tokens were computed")
    return None


def process_died(evidence: Evidence) -> Answer:
    """By the history of the run, and by the lives of the processes, in case the history was cut."""
    events = [
        f"{event.get('name') or event.get('node')} {_FATAL_EVENTS[event['event']]}"
        for event in evidence.events
        if event["event"] in _FATAL_EVENTS
    ]
    other = [name for name, life in evidence.before.lives.items() if evidence.after.lives.get(name) != life]
    if events or other:
        return Invalid("; ".join(dict.fromkeys(events)) or f"{', '.join(other)} is not the process that it was before")
    if evidence.after.phase != "ready":
        return Invalid(f"the deployment is {evidence.after.phase}")
    return None


def client_saturated(evidence: Evidence) -> Answer:
    wanted = evidence.client.wanted
    if wanted is None:
        return Unknown(
            "the client's use of its CPU could not be measured (no /proc/PID/schedstat, or it was too short)"
        )
    if wanted < SATURATED:
        return None
    return Invalid(
        f"the client ran or waited for a CPU during {wanted:.0%} of the time: its latencies are its own. Fewer requests"
        " at a time, or a machine with free cores for the client, measure the deployment"
    )


def sent_late(evidence: Evidence) -> Answer:
    """At a rate. A client that falls behind asks less of the deployment than the result claims."""
    rate = evidence.load.rate
    if rate is None or not evidence.records:
        return None
    starts = [record.started for record in evidence.records]
    took, asked = max(starts) - min(starts), len(starts) / rate
    if took <= asked * (1 + _LATE_SHARE) + _LATE_SECONDS:
        return None
    return Invalid(f"the client needed {took:.1f} s to send what {rate:g} requests/s would have sent in {asked:.1f} s")


def clock_jumped(evidence: Evidence) -> Answer:
    before, after = evidence.before.clocks, evidence.after.clocks
    moved = (after.wall - before.wall) - (after.boot - before.boot)
    slept = (after.boot - before.boot) - (after.monotonic - before.monotonic)
    if slept > CLOCK_SECONDS:
        return Invalid(f"the machine was suspended for {slept:.1f} s")
    if abs(moved) > CLOCK_SECONDS:
        return Invalid(f"the clock of this machine was set by {moved:+.1f} s")
    return None


def deployment_changed(evidence: Evidence) -> Answer:
    if evidence.before.run_id != evidence.after.run_id:
        return Invalid(f"another run serves now: {evidence.after.run_id}")
    if evidence.before.plan != evidence.after.plan:
        return Invalid("another plan was applied (pdserve up on the running deployment)")
    return None


def other_traffic(evidence: Evidence) -> Answer:
    """What others sent is in our counters and took time of the engines."""
    counted = evidence.proxy()
    if "completions" not in counted and "chats" not in counted:
        return Unknown("the proxy does not count requests" + _why(evidence.after.proxy.error))
    answered = counted.get("completions", 0) + counted.get("chats", 0)
    if answered <= len(evidence.records):
        return None
    return Invalid(f"the proxy answered {answered:.0f} requests, and the client sent {len(evidence.records)}")


CHECKS: Mapping[str, Check] = {
    "client": client_failed,
    "completed": nothing_completed,
    "errors": too_many_errors,
    "output-length": output_lengths,
    "prompt-length": prompt_lengths,
    "decode-computed": decode_computed,
    "transfers": transfers_failed,
    "cache": cache_stored_nothing,
    "processes": process_died,
    "client-cpu": client_saturated,
    "rate": sent_late,
    "clock": clock_jumped,
    "deployment": deployment_changed,
    "other-traffic": other_traffic,
}


def _tiers(evidence: Evidence) -> dict[str, tuple[float | None, int]]:
    """Cache tiers that are on -> what they stored, and the tokens of their unit."""
    engines, classes = evidence.engines("prefill", "aggregated"), _connector_classes(evidence)
    tiers: dict[str, tuple[float | None, int]] = {}
    if evidence.plan.lmcache:
        tiers["LMCache"] = (evidence.caches().get("written"), evidence.plan.chunk_size or 1)
    if "MooncakeStoreConnector" in classes:
        sent = engines.get("store_keys")
        tiers["the Mooncake store"] = (None if sent is None else sent - engines.get("store_failed", 0), _BLOCK)
    if "OffloadingConnector" in classes:
        tiers["host memory"] = (engines.get("offload_bytes"), _BLOCK)
    return tiers


_BLOCK = 256
"""Tokens of the largest KV block that engines have; smaller prompts may hold no whole block."""


def _connector_classes(evidence: Evidence) -> Collection[str]:
    return {connector.class_name for process in evidence.plan.processes for connector in process.connectors}


def _counts_failures(evidence: Evidence, counted: Mapping[str, float]) -> bool:
    decoders = [evidence.plan.process(name) for name in evidence.names("decode")]
    patched = all("mooncake-pulls" in process.patches for process in decoders)
    return patched or "nixl_failed" in counted


def _silent(evidence: Evidence, *roles: str) -> Unknown | None:
    """The first engine of a role that could not be read."""
    for name in evidence.names(*roles):
        for reading in (evidence.before, evidence.after):
            if name not in reading.engines or reading.engines[name].error:
                why = reading.engines[name].error if name in reading.engines else ""
                return Unknown(f"the metrics of {name} could not be read{_why(why)}")
    return None


def _why(error: str) -> str:
    return f" ({error})" if error else ""
