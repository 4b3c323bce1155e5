"""The verdict on a measurement: each check is a pure function of the evidence.

A check that could not be made is shown beside the verdict: it proves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pdserve.bench.figures import RequestRecord
from pdserve.bench.snapshot import FAILED_TRANSFERS, CpuUse, DeploymentSnapshot, sum_growth
from pdserve.bench.workload import Load, Workload
from pdserve.plan.frozen import Frozen
from pdserve.plan.model import LmcacheServer, Plan
from pdserve.run.history import incident


@dataclass(frozen=True)
class Invalid:
    """The figures do not count."""

    text: str


@dataclass(frozen=True)
class Unknown:
    """Says that something could not be checked."""

    text: str


Answer = Invalid | Unknown | None
"""None: it holds."""


@dataclass(frozen=True)
class Evidence:
    """Holds what is known of a single measurement: a load, once."""

    plan: Plan
    workload: Workload
    load: Load
    records: Sequence[RequestRecord]
    before: DeploymentSnapshot
    after: DeploymentSnapshot
    run_id: str
    """The run of the deployment that the benchmark began with."""
    plan_digest: str
    """The digest of `plan`."""
    events: Sequence[Mapping[str, Any]] = ()
    """The history of the run in between."""
    client: CpuUse = field(default_factory=CpuUse)
    client_problem: str = ""
    """Why the client gave no result."""
    warmup: Sequence[RequestRecord] | None = None
    """Its requests; None: none was asked for."""
    warmup_problem: str = ""
    """Why the client gave no result of the warm-up."""
    asked_input: int | None = None
    """Tokens of all prompts of the trace together; None: it does not have them."""
    theory: float = 0.0
    """The share of its prompts that a trace repeats itself, answers of earlier turns among them."""

    @property
    def done(self) -> list[RequestRecord]:
        return [record for record in self.records if record.ok]

    @property
    def slowest(self) -> float:
        """Return the seconds that an answer took at most."""
        return max((record.e2e for record in self.done), default=0.0)

    @property
    def longest_prompt(self) -> int:
        """Return the length of the longest prompt in tokens: as asked for, else as the server counted."""
        return self.workload.input_tokens or max((record.prompt_tokens for record in self.done), default=0)

    def names(self, *roles: str) -> list[str]:
        """Return the names of the workers that have one of these roles."""
        return [worker.name for worker in self.plan.proxy.workers if worker.role in roles]

    def engines(self, *roles: str) -> dict[str, float]:
        """Return what the engines of these roles counted together."""
        return self.counted_by(*self.names(*roles))

    def counted_by(self, *names: str) -> dict[str, float]:
        """Return what these engines counted together."""
        return sum_growth(self.before.engines, self.after.engines, names)

    def caches(self, *names: str) -> dict[str, float]:
        """Return what these LMCache servers counted together; without a name, all of them."""
        return sum_growth(self.before.caches, self.after.caches, names or self.after.caches)

    def proxy(self) -> dict[str, float]:
        """Return what the proxy counted."""
        return sum_growth({"proxy": self.before.proxy}, {"proxy": self.after.proxy}, ("proxy",))


PROMPT_TOLERANCE = 0.02
"""Share by which a prompt may differ from what was asked: text of random tokens is not always read back as the same
number of tokens."""
_PROMPT_TOKENS = 2
"""At least: a tokenizer adds a first token of its own."""
SATURATED = 0.9
"""Share of the time in which the client's main thread ran or waited for a CPU. Above it, requests are sent late and
answers are read late, and the latencies are the client's."""
_TRACE_TOLERANCE, TEMPLATE_TOKENS = 0.1, 64
"""For a trace, the share by which all prompts together may differ, and what a chat template may add to each."""
_OFF_SHARE, _OFF_SECONDS = 0.1, 0.3
"""How much the sending of all requests may take longer or shorter than their rate asks for."""
_HUNG = 2
"""Times the slowest answer, after which a request that is still open counts as failed."""
_CUT_SHARE = 0.5
"""Share of all requests: with more of them open at the end the figures are those of the fast minority."""
_DEVIATIONS = 3
"""Standard deviations of a time that is left to chance, beyond which it is no chance."""
_FIRST_GAPS = 8
"""Mean gaps that the first of random ones is at most, but for one of three thousand."""


def client_failed(evidence: Evidence) -> Answer:
    if evidence.client_problem:
        return Invalid(evidence.client_problem)
    reported, asked = len(evidence.records), evidence.load.requests
    if reported == asked or (evidence.load.seconds is not None and reported < asked):
        return None  # the time may be over first
    return Invalid(f"the client reports {reported} of {asked} requests")


def not_warmed_up(evidence: Evidence) -> Answer:
    """Judge the warm-up: without any answer to it a measurement begins cold. A warm-up that went wrong later is
    shown."""
    if evidence.warmup is None:
        return None
    if not any(record.ok for record in evidence.warmup):
        errors = [record.error for record in evidence.warmup if record.error]
        why = evidence.warmup_problem or (f"for example: {errors[0][:200]}" if errors else "no reason is known")
        return Invalid(f"no request of the warm-up was answered: {why}")
    return Unknown(f"the warm-up was not whole: {evidence.warmup_problem}") if evidence.warmup_problem else None


def nothing_completed(evidence: Evidence) -> Answer:
    if not evidence.done:
        return Invalid("no request was answered with a token")
    cut = sum(record.cut for record in evidence.records)
    if cut > _CUT_SHARE * len(evidence.records):
        return Invalid(
            f"{cut} of {len(evidence.records)} requests were still open when the time was over: the figures are those"
            " of the others. A longer --grace, or a smaller load, measures all"
        )
    return None


def too_many_errors(evidence: Evidence) -> Answer:
    """Judge the share of failed requests. A request that was open at the end was so for all of the grace time at least:
    where every answer took less than half of that, it hung. This does not hold in a trace, where it may have been asked
    for a longer answer than all others."""
    alike = bool(evidence.done) and evidence.workload.trace is None
    hung = alike and evidence.load.grace > _HUNG * evidence.slowest
    failed = [record for record in evidence.records if not record.ok and (hung or not record.cut)]
    # A quotient, which is rounded as the option was: 0.29 * 100 is below 29.
    if not failed or len(failed) / len(evidence.records) <= evidence.workload.max_failed:
        return None
    errors = [record.error for record in failed if record.error]
    example = f", for example: {errors[0][:200]}" if errors else ""
    if open_ones := sum(record.cut for record in failed):
        example += (
            f"; {open_ones} of them were open for at least {evidence.load.grace:g} s at the end, and no answer"
            f" took longer than {evidence.slowest:.1f} s"
        )
    return Invalid(
        f"{len(failed)} of {len(evidence.records)} requests failed, and {evidence.workload.max_failed:.1%} may"
        f" (--max-failed){example}"
    )


def output_lengths(evidence: Evidence) -> Answer:
    """Judge the lengths of the answers. A stream that ends with an error event, or early, counts as answered for the
    client: its length gives it away."""
    asked = evidence.workload.output_tokens
    wrong = [r for r in evidence.done if r.output_tokens != (asked if r.asked_output is None else r.asked_output)]
    if not wrong:
        return None
    what = f"{len(wrong)} of {len(evidence.done)} answers have another length than"
    if evidence.workload.trace is not None:
        return Invalid(
            f"{what} the trace asks for, the first one {wrong[0].output_tokens}, not {wrong[0].asked_output}"
        )
    lengths = [record.output_tokens for record in wrong]
    return Invalid(f"{what} the {asked} tokens that were asked for ({min(lengths)} to {max(lengths)})")


def prompt_lengths(evidence: Evidence) -> Answer:
    asked = evidence.workload.input_tokens
    if asked is None:
        return _trace_lengths(evidence)
    allowed = max(_PROMPT_TOKENS, PROMPT_TOLERANCE * asked)
    wrong = [record.prompt_tokens for record in evidence.done if abs(record.prompt_tokens - asked) > allowed]
    if not wrong:
        return None
    return Invalid(
        f"{len(wrong)} of {len(evidence.done)} prompts have another length than the {asked} tokens that were asked for"
        f" ({min(wrong)} to {max(wrong)} as the server counts): the client's tokenizer is not the model's (--tokenizer)"
    )


def _trace_lengths(evidence: Evidence) -> Answer:
    """Compare the lengths of all prompts together: a chat template adds tokens to each, and text is not always read
    back as the same number of tokens."""
    if evidence.asked_input is None:
        return Unknown("the trace has text, not lengths: how many tokens its prompts should have is not known")
    if len(evidence.done) < max(len(evidence.records), evidence.load.requests):
        # Requests that the end of the time left unsent have no record at all.
        return Unknown("not every request was answered: the prompts of the others are not counted")
    counted = sum(record.prompt_tokens for record in evidence.done)
    allowed = max(_TRACE_TOLERANCE * evidence.asked_input, TEMPLATE_TOKENS * len(evidence.done))
    if abs(counted - evidence.asked_input) <= allowed:
        return None
    return Invalid(
        f"the prompts have {counted} tokens as the server counts, and the trace asks for {evidence.asked_input}: the"
        " client's tokenizer is not the model's (--tokenizer)"
    )


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


def off_rate(evidence: Evidence) -> Answer:
    """Judge whether requests were sent at the rate that was asked for. A client that falls behind asks less of the
    deployment than the result claims, and one that hurries asks more."""
    rate = evidence.load.rate
    if rate is None or not evidence.records:
        return None
    if evidence.workload.trace is not None:
        return Unknown("turns of a session wait for each other: whether the rate was kept is not known")
    # When requests were sent that were open at the end is not known.
    starts = [record.started for record in evidence.records if not record.cut]
    if len(starts) < 2:
        return Unknown("too few requests ended to know whether the rate was kept")
    took, least, most = max(starts) - min(starts), len(starts) / rate, len(evidence.records) / rate
    # Both clients have a gap before the first request too. vLLM's stretches all of them to the time that the rate asks
    # for. AIPerf does not: the time of n requests has a standard deviation of sqrt(n) gaps.
    drawn = evidence.workload.client_for(evidence.load) == "aiperf"
    chance = _DEVIATIONS * math.sqrt(len(starts)) / rate if drawn else 0.0
    slack = most * _OFF_SHARE + _OFF_SECONDS + chance
    if least - (1 if drawn else _FIRST_GAPS) / rate - slack <= took <= most + slack:
        return None
    return Invalid(f"the client needed {took:.1f} s to send what {rate:g} requests/s would have sent in {most:.1f} s")


RECOMPUTED = 1
"""Prompt tokens that decode may compute of every request: it needs the logits of the last token. vLLM counts a prompt
that NIXL or Mooncake brought as received to the last token. Of a hybrid model they leave the last one to decode, and
other connectors do so of every model."""
CLOCK_SECONDS = 0.5
"""How far two clocks may part: NTP moves the wall clock by less than half a millisecond a second."""


def decode_computed(evidence: Evidence) -> Answer:
    """Judge what decode has computed, only in prefill/decode. A proxy with `routing.conditional` sends prompts to
    decode alone by the recipe's wish."""
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
            allowed = each + alone * evidence.longest_prompt * (1 + PROMPT_TOLERANCE)
            return None if computed <= allowed else _not_transferred(evidence, computed, f"{allowed:.0f}")
    if _receives_whole_prompts(evidence):
        return _not_transferred(evidence, computed, "0")
    if not RECOMPUTED * len(evidence.done) <= computed <= each:
        return _not_transferred(evidence, computed, f"0, or one of each request ({each:.0f}),")
    return Unknown(
        f"decode computed {computed:.0f} prompt tokens: the last one of each request, which its connector may leave to"
        " it, or some whole prompts"
    )


def _receives_whole_prompts(evidence: Evidence) -> bool:
    """Return whether some decode has received prompts and computed nothing, ever or meanwhile: its connector then
    leaves no last token to decode, and that is the same for all of them."""
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
    if not failed:
        return None
    return Invalid(", ".join(f"{count} {FAILED_TRANSFERS[name].title}" for name, count in failed.items()))


def cache_stored_nothing(evidence: Evidence) -> Answer:
    """Judge what the cache tiers have stored. Prompts that were computed and have a whole chunk must be stored by every
    tier that the recipe turns on: by all engines together, and by each of them."""
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
    """Judge by the history of the run, and by the lives of the processes, in case the history was cut."""
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
    moved = (after.wall - before.wall) - (after.monotonic - before.monotonic)
    if abs(moved) <= CLOCK_SECONDS:
        return None
    return Invalid(f"the clock of this machine was set by {moved:+.1f} s, or the machine was suspended")


def deployment_changed(evidence: Evidence) -> Answer:
    """Judge whether the deployment is still that of when the benchmark began, not only when this measurement did: the
    provenance and the number of GPUs are of then."""
    for snapshot in (evidence.before, evidence.after):
        if snapshot.run_id != evidence.run_id:
            return Invalid(f"another run serves now: {snapshot.run_id}")
        if snapshot.plan != evidence.plan_digest:
            return Invalid("another plan was applied (pdserve up on the running deployment)")
    return None


def second_attempts(evidence: Evidence) -> Answer:
    """Judge requests that a worker failed and another answered: the client sees only a slow answer."""
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
    """Judge the requests of others: what they sent is in our counters and took time of the engines."""
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
    """Returns what these engines have stored. None: it is not reported."""


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
    """Return whether these engines have computed a whole chunk of some prompt. Of a trace it is not known which prompts
    came to an engine."""
    of_all = evidence.workload.trace is None or len(names) == len(evidence.names("prefill", "aggregated"))
    return of_all and computed >= chunk and evidence.longest_prompt >= chunk


_BLOCK = 256
"""Tokens of the largest KV block that engines have; smaller prompts may hold no whole block."""


def _silent(evidence: Evidence, *roles: str) -> Unknown | None:
    """Return a note on the first engine of these roles that could not be read."""
    for name in evidence.names(*roles):
        for snapshot in (evidence.before, evidence.after):
            if name not in snapshot.engines or snapshot.engines[name].error:
                why = snapshot.engines[name].error if name in snapshot.engines else ""
                return Unknown(f"the metrics of {name} could not be read{_why(why)}")
    return None


def _unread_proxy(evidence: Evidence) -> str:
    """Return why the proxy could not be read; empty: it was, both times."""
    return evidence.before.proxy.error or evidence.after.proxy.error


def _why(error: str) -> str:
    return f" ({error})" if error else ""


TOLERANCE = 0.05
"""Share by which the engines' counts and the client's may differ."""
_EACH = 2
"""Tokens of every request by which they may differ too: the last of a prompt that was cached whole is computed anyway,
and prefill generates one."""
WARM_SHARE = 0.5
"""Share of all prompt tokens. Every run has the same prompts (one seed): without an effect of the salt nearly all
blocks would come from a cache. Random prompts of one run share blocks with each other where the vocabulary is small:
13 % with that of recipes/tiny-cpu.yaml and 32 prompts."""
_SOURCES = ("computed", "local_hits", "received")
_TokenKind = Literal["prompt", "answer"]


def tokens_differ(evidence: Evidence) -> Answer:
    """Compare the client's tokens with the engines': prompts by where their tokens came from on prefill and on decode,
    and answers as decode generated them. More than the client knows of is work for somebody else that went straight to
    the engines; less is a client that claims too much."""
    if not evidence.done:
        return None  # which is INVALID already
    if unread := [name for name in evidence.names("prefill", "decode", "aggregated") if not evidence.counted_by(name)]:
        return Unknown(f"what {', '.join(unread)} counted is not known")
    counts: list[tuple[_TokenKind, tuple[str, ...]]] = [("prompt", ("decode",)), ("answer", ("decode", "aggregated"))]
    unknown: Unknown | None = None
    if evidence.plan.proxy.routing.conditional is None or evidence.proxy().get("single_engine", 1.0) <= 0:
        counts.append(("prompt", ("prefill", "aggregated")))
    else:
        unknown = Unknown("prompts may have gone to decode alone: how many tokens prefill should have is not known")
    for kind, roles in counts:
        answer = _compared(evidence, kind, roles) if evidence.names(*roles) else None
        if isinstance(answer, Invalid):
            return answer
        unknown = unknown or answer
    return unknown


def _compared(evidence: Evidence, kind: _TokenKind, roles: tuple[str, ...]) -> Invalid | Unknown | None:
    counted = evidence.engines(*roles)
    counters = _SOURCES if kind == "prompt" else ("generated",)
    if counters[0] not in counted:
        return Unknown(f"the {' and '.join(evidence.names(*roles))} engines do not count {kind} tokens")
    number = sum(counted.get(counter, 0.0) for counter in counters)
    known = [record.prompt_tokens if kind == "prompt" else record.output_tokens for record in evidence.done]
    told = sum(known)
    slack = TOLERANCE * told + _EACH * len(evidence.records)
    names = " and ".join(evidence.names(*roles))
    text = f"the {names} engines counted {number:.0f} {kind} tokens, and the client knows of {told}"
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
    if counted.get("preemptions", 0.0) and kind == "prompt":
        return Unknown(f"{text}: of {counted['preemptions']:.0f} preemptions it is not known how they are counted")
    return Invalid(text)


def cache_was_warm(evidence: Evidence) -> Answer:
    """Judge whether prompts were in a cache before they were sent. Each run of the client has a `cache_salt` of its own
    (pdserve.bench.clients), by which vLLM and LMCache key a block: what was there before cannot be loaded, also where
    it could not be removed (pdserve.sweep.caches). A trace repeats itself, which a cold cache has too; the limit is of
    the rest."""
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


Check = Callable[[Evidence], Answer]


class Reason(Frozen):
    """A check that did not hold, or that could not be made."""

    check: str
    text: str


class BenchVerdict(Frozen):
    """Says whether the figures of a measurement count."""

    status: Literal["VALID", "INVALID"]
    reasons: tuple[Reason, ...] = ()
    unchecked: tuple[Reason, ...] = ()

    @property
    def valid(self) -> bool:
        return self.status == "VALID"


def judge(evidence: Evidence) -> BenchVerdict:
    """Judge by every check, so that a user sees all reasons at once."""
    reasons, unchecked = [], []
    for name, check in CHECKS.items():
        answer = check(evidence)
        if isinstance(answer, Invalid):
            reasons.append(Reason(check=name, text=answer.text))
        elif isinstance(answer, Unknown):
            unchecked.append(Reason(check=name, text=answer.text))
    return BenchVerdict(status="INVALID" if reasons else "VALID", reasons=tuple(reasons), unchecked=tuple(unchecked))


CHECKS: Mapping[str, Check] = {
    "warm-up": not_warmed_up,
    "client": client_failed,
    "completed": nothing_completed,
    "errors": too_many_errors,
    "output-length": output_lengths,
    "prompt-length": prompt_lengths,
    "tokens": tokens_differ,
    "decode-computed": decode_computed,
    "transfers": transfers_failed,
    "second-attempts": second_attempts,
    "cache": cache_stored_nothing,
    "cold-cache": cache_was_warm,
    "processes": process_died,
    "client-cpu": client_saturated,
    "rate": off_rate,
    "clock": clock_jumped,
    "deployment": deployment_changed,
    "other-traffic": other_traffic,
}
