"""Whether the deployment did what its recipe asks for, all the time: each check is a pure function of the evidence."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pdserve.bench.answers import Answer, Invalid, Unknown
from pdserve.bench.client_checks import PROMPT_TOLERANCE
from pdserve.bench.evidence import Evidence
from pdserve.bench.snapshot import FAILED_TRANSFERS

RECOMPUTED = 1
"""Prompt tokens that decode computes of every request: it needs the logits of the last token."""
CLOCK_SECONDS = 0.5
"""By which two clocks may part: NTP moves the wall clock by less than half a millisecond a second."""
_FATAL_EVENTS = {
    "died": "died",
    "late": "was not ready in time",
    "given_up": "did not answer and counts as dead",
    "restarting": "is being restarted",
    "cache_down": "is down",
    "unresponsive": "did not answer",
    "agent_gone": "lost its agent",
}


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
        if computed > allowed and (unread := _unread_proxy(evidence)):
            return Unknown(f"what the proxy sent to decode alone is not known{_why(unread)}")
        alone = evidence.proxy().get("single_engine", 0)
        allowed += alone * evidence.longest_prompt * (1 + PROMPT_TOLERANCE)
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
    tiers = _tiers(evidence)
    if tiers and (missing := _silent(evidence, "prefill", "aggregated")):
        return missing
    computed = evidence.engines("prefill", "aggregated").get("computed")
    if computed is None:
        return Unknown("the engines do not count which prompt tokens they computed") if tiers else None
    for tier, (stored, chunk) in tiers.items():
        whole = computed >= chunk and evidence.longest_prompt >= chunk
        if stored is None and whole:
            return Unknown(f"{tier} reports nothing of what it stored, or could not be read")
        if stored == 0 and whole:
            return Invalid(f"{tier} is on and stored nothing, while {computed:.0f} prompt tokens were computed")
    return None


def process_died(evidence: Evidence) -> Answer:
    """By the history of the run, and by the lives of the processes, in case the history was cut."""
    events = [what for event in evidence.events if (what := incident(event)) is not None]
    other = [name for name, life in evidence.before.lives.items() if evidence.after.lives.get(name) != life]
    if events or other:
        return Invalid("; ".join(dict.fromkeys(events)) or f"{', '.join(other)} is not the process that it was before")
    if evidence.after.phase != "ready":
        return Invalid(f"the deployment is {evidence.after.phase}")
    return None


def incident(event: Mapping[str, Any]) -> str | None:
    """What went wrong, by an event of the history; None: nothing did."""
    what = _FATAL_EVENTS.get(event["event"])
    return None if what is None else f"{event.get('name') or event.get('node')} {what}"


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
    if "requests" not in counted:
        return Unknown("the proxy does not count requests" + _why(_unread_proxy(evidence)))
    # A client asks for the tokens of its texts too (vLLM's does), which computes nothing.
    answered = counted["requests"] - counted.get("tokenized", 0)
    if answered <= len(evidence.records):
        return None
    return Invalid(f"the proxy answered {answered:.0f} requests, and the client sent {len(evidence.records)}")


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
        for snapshot in (evidence.before, evidence.after):
            if name not in snapshot.engines or snapshot.engines[name].error:
                why = snapshot.engines[name].error if name in snapshot.engines else ""
                return Unknown(f"the metrics of {name} could not be read{_why(why)}")
    return None


def _unread_proxy(evidence: Evidence) -> str:
    """Why the proxy could not be read; empty: it was, both times."""
    return evidence.before.proxy.error or evidence.after.proxy.error


def _why(error: str) -> str:
    return f" ({error})" if error else ""
