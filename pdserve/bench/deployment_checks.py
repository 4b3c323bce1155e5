"""Whether the deployment did what its recipe asks for, all the time: each check is a pure function of the evidence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pdserve.bench.answers import Answer, Invalid, Unknown
from pdserve.bench.client_checks import PROMPT_TOLERANCE
from pdserve.bench.evidence import Evidence
from pdserve.bench.snapshot import FAILED_TRANSFERS
from pdserve.plan.model import LmcacheServer
from pdserve.run.history import incident

RECOMPUTED = 1
"""Prompt tokens that decode may compute of every request: it needs the logits of the last token. vLLM counts a prompt
that NIXL or Mooncake brought as received to the last token. Of a hybrid model they leave the last one to decode, and
other connectors do so of every model."""
CLOCK_SECONDS = 0.5
"""By which two clocks may part: NTP moves the wall clock by less than half a millisecond a second."""


def decode_computed(evidence: Evidence) -> Answer:
    """Only in prefill/decode. A proxy with `routing.conditional` sends prompts to decode alone by the recipe's wish."""
    if evidence.plan.mode != "disaggregated":
        return None
    if missing := _silent(evidence, "decode"):
        return missing
    computed = evidence.engines("decode").get("computed")
    if computed is None:
        return Unknown("the decode engines do not count where the tokens of their prompts came from")
    if computed <= 0:
        return None
    each: float = RECOMPUTED * len(evidence.records)
    if evidence.plan.proxy.routing.conditional is not None:
        if unread := _unread_proxy(evidence):
            return Unknown(f"what the proxy sent to decode alone is not known{_why(unread)}")
        if alone := evidence.proxy().get("single_engine", 0):
            allowed = each + _may_compute(evidence, round(alone)) * (1 + PROMPT_TOLERANCE)
            return None if computed <= allowed else _not_transferred(evidence, computed, f"{allowed:.0f}")
    if _receives_whole_prompts(evidence):
        return _not_transferred(evidence, computed, "0")
    if not RECOMPUTED * len(evidence.done) <= computed <= each:
        return _not_transferred(evidence, computed, f"0, or one of each request ({each:.0f}),")
    return Unknown(
        f"decode computed {computed:.0f} prompt tokens: the last one of each request, which its connector may leave to"
        " it, or some whole prompts"
    )


def _may_compute(evidence: Evidence, alone: int) -> float:
    """Tokens of so many prompts that the proxy sends to decode alone: the shortest ones. Where it also sends those of
    which decode lacks little, any of them may be among them."""
    thresholds = evidence.plan.proxy.routing.conditional
    if thresholds is None or thresholds.max_missing_tokens is not None:
        return alone * evidence.longest_prompt
    unknown = len(evidence.records) - len(evidence.done)
    known = sorted(record.prompt_tokens for record in evidence.done)
    return sum(known[:alone]) + min(unknown, alone) * evidence.longest_prompt


def _receives_whole_prompts(evidence: Evidence) -> bool:
    """Whether some decode has received prompts and computed nothing, ever or meanwhile: its connector then leaves no
    last token to decode, and that is the same for all of them."""
    names = evidence.names("decode")
    counted = [*(evidence.before.engines[name].values for name in names), *map(evidence.counted_by, names)]
    return any(values.get("received", 0) > 0 and values.get("computed") == 0 for values in counted)


def _not_transferred(evidence: Evidence, computed: float, right: str) -> Invalid:
    share = computed / max(1, sum(record.prompt_tokens for record in evidence.records))
    return Invalid(
        f"decode computed {computed:.0f} prompt tokens itself ({share:.1%} of all), and {right} would be right: their"
        " KV was not transferred"
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
    if not _counts_failures(evidence):
        return Unknown("the decode engines do not count every transfer that fails: only recomputed prompts show them")
    return None


def cache_stored_nothing(evidence: Evidence) -> Answer:
    """Prompts that were computed and have a whole chunk must be stored by every tier that the recipe turns on: by all
    engines together, and by each of them."""
    tiers = list(_tiers(evidence))
    if tiers and (missing := _silent(evidence, "prefill", "aggregated")):
        return missing
    unknown: Unknown | None = None
    for tier in tiers:
        alone = [(name,) for name in tier.engines] if len(tier.engines) > 1 else []
        for names in (tier.engines, *alone):
            computed, stored = evidence.counted_by(*names).get("computed"), tier.stored(names)
            if computed is None:
                unknown = unknown or Unknown("the engines do not count which prompt tokens they computed")
            elif not _computed_a_chunk(evidence, computed, tier.chunk, names):
                continue
            elif stored is None:
                unknown = unknown or Unknown(f"{tier.title} reports nothing of what it stored, or could not be read")
            elif stored <= 0:
                of = f" of {names[0]}" if names in alone else ""
                return Invalid(
                    f"{tier.title} is on and stored nothing{of}, while {computed:.0f} prompt tokens were computed"
                    f"{' there' if of else ''}"
                )
    return unknown


def process_died(evidence: Evidence) -> Answer:
    """By the history of the run, and by the lives of the processes, in case the history was cut."""
    events = [what for event in evidence.events if (what := incident(event)) is not None]
    other = [name for name, life in evidence.before.lives.items() if evidence.after.lives.get(name) != life]
    if events or other:
        return Invalid("; ".join(dict.fromkeys(events)) or f"{', '.join(other)} is not the process that it was before")
    if evidence.before.phase != "ready":
        return Invalid(f"the deployment was {evidence.before.phase} when the measurement began")
    if evidence.after.phase != "ready":
        return Invalid(f"the deployment is {evidence.after.phase}")
    return None


def clock_jumped(evidence: Evidence) -> Answer:
    before, after = evidence.before.clocks, evidence.after.clocks
    moved = (after.wall - before.wall) - (after.boot - before.boot)
    slept = (after.boot - before.boot) - (after.monotonic - before.monotonic)
    if slept > CLOCK_SECONDS:
        return Invalid(f"the machine was suspended for {slept:.1f} s")
    if abs(moved) > CLOCK_SECONDS:
        return Invalid(f"the clock of this machine was set by {moved:+.1f} s")
    if evidence.clock_moved > CLOCK_SECONDS:
        return Invalid(f"the clock of this machine was set by {evidence.clock_moved:.1f} s, and back")
    return None


def deployment_changed(evidence: Evidence) -> Answer:
    """Since the benchmark began, not only since this measurement: the provenance and the number of GPUs are of then."""
    for snapshot in (evidence.before, evidence.after):
        if snapshot.run_id != evidence.run_id:
            return Invalid(f"another run serves now: {snapshot.run_id}")
        if snapshot.plan != evidence.plan_digest:
            return Invalid("another plan was applied (pdserve up on the running deployment)")
    return None


def second_attempts(evidence: Evidence) -> Answer:
    """A request that a worker failed and another answered: the client sees only a slow answer."""
    counted = evidence.proxy()
    if "requests" not in counted:
        return Unknown("the proxy does not count second attempts" + _why(_unread_proxy(evidence)))
    # It is on its page from the first one on.
    attempts = counted.get("failovers", 0.0)
    if attempts <= evidence.workload.max_failed * len(evidence.records):
        return None
    return Invalid(
        f"the proxy tried {attempts:.0f} times again, for {len(evidence.records)} requests, and"
        f" {evidence.workload.max_failed:.1%} of them may (--max-failed): their times have a failed attempt in them"
    )


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


@dataclass(frozen=True)
class _Tier:
    """A cache tier that is on."""

    title: str
    chunk: int
    """Tokens of its unit."""
    engines: tuple[str, ...]
    """Which compute prompts, and store there."""
    stored: Callable[[tuple[str, ...]], float | None]
    """Of these engines. None: it is not reported."""


def _tiers(evidence: Evidence) -> Iterator[_Tier]:
    plan, names = evidence.plan, evidence.names("prefill", "aggregated")

    def with_connector(class_name: str) -> tuple[str, ...]:
        connectors = {name: plan.process(name).connectors for name in names}
        return tuple(name for name in names if class_name in {connector.class_name for connector in connectors[name]})

    def in_lmcache(counter: str, servers: Sequence[LmcacheServer]) -> Callable[[tuple[str, ...]], float | None]:
        def stored(engines: tuple[str, ...]) -> float | None:
            its = [server.process for server in servers if not set(engines).isdisjoint(server.engines)]
            return evidence.caches(*its).get(counter)

        return stored

    def attached(servers: Sequence[LmcacheServer]) -> tuple[str, ...]:
        return tuple(name for name in names if any(name in server.engines for server in servers))

    def in_store(engines: tuple[str, ...]) -> float | None:
        counted = evidence.counted_by(*engines)
        return counted.get("store_keys", 0) - counted.get("store_failed", 0)

    def in_host_memory(engines: tuple[str, ...]) -> float | None:
        return evidence.counted_by(*engines).get("offload_bytes")

    # Every store policy of LMCache writes what L1 has got to the L2 too.
    with_l2 = [server for server in plan.lmcache if plan.has_l2(server)]
    for title, counter, servers in (("LMCache", "written", plan.lmcache), ("LMCache's L2", "l2_written", with_l2)):
        if engines := attached(servers):
            yield _Tier(title, plan.chunk_size or 1, engines, in_lmcache(counter, servers))
    # vLLM makes its counters of the store with their first operation: a page that was read and has none had none.
    if engines := with_connector("MooncakeStoreConnector"):
        yield _Tier("the Mooncake store", _BLOCK, engines, in_store)
    if engines := with_connector("OffloadingConnector"):
        yield _Tier("host memory", _BLOCK, engines, in_host_memory)


def _computed_a_chunk(evidence: Evidence, computed: float, chunk: int, names: tuple[str, ...]) -> bool:
    """Whether these engines have computed a whole chunk of some prompt. Of a trace it is not known which prompts came
    to an engine: there it is certain only beyond what all prompts together can have without a whole chunk."""
    if computed < chunk or evidence.longest_prompt < chunk:
        return False
    if evidence.workload.trace is None or len(names) == len(evidence.names("prefill", "aggregated")):
        return True
    return computed > sum(min(r.prompt_tokens, chunk - 1) if r.ok else chunk - 1 for r in evidence.records)


_BLOCK = 256
"""Tokens of the largest KV block that engines have; smaller prompts may hold no whole block."""


def _counts_failures(evidence: Evidence) -> bool:
    """Whether every decode does: by a patch that is active in it, or by what vLLM has on its page."""

    def counts(name: str) -> bool:
        patches, counted = evidence.after.patches.get(name, ()), evidence.counted_by(name)
        # Before vllm 0.33, which the patch mooncake-prom-metrics is for, not every pull that fails is counted as one.
        of_mooncake = "mooncake_not_received" in counted and "mooncake-prom-metrics" not in patches
        return "mooncake-pulls" in patches or "nixl_failed" in counted or of_mooncake

    return all(map(counts, evidence.names("decode")))


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
