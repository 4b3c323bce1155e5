"""Whether the client did what was asked for: each check is a pure function of the evidence."""

from __future__ import annotations

import math

from pdserve.bench.answers import Answer, Invalid, Unknown
from pdserve.bench.evidence import Evidence

PROMPT_TOLERANCE = 0.02
"""Share by which a prompt may differ from what was asked: text of random tokens is not always read back as the same
number of tokens."""
_PROMPT_TOKENS = 2
"""At least: a tokenizer adds a first token of its own."""
SATURATED = 0.9
"""Share of the time in which the client's main thread ran or waited for a CPU. Above it, requests are sent late and
answers are read late, and the latencies are the client's."""
_TRACE_TOLERANCE, TEMPLATE_TOKENS = 0.1, 64
"""Of a trace: the share by which all prompts together may differ, and what a chat template may add to each."""
_OFF_SHARE, _OFF_SECONDS = 0.1, 0.3
"""By which the sending of all requests may take longer or shorter than their rate asks for."""
_HUNG = 2
"""Times the slowest answer, after which a request that is still open counts as failed."""
_CUT_SHARE = 0.5
"""Of all requests: with more of them open at the end the figures are those of the fast minority."""
_DEVIATIONS = 3
"""Of a time that is left to chance, beyond which it is none."""
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
    """Without any answer to its warm-up a measurement begins cold. One that went wrong later is shown."""
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
    """A request that was open at the end was so for all of the grace time at least: where every answer took less than
    half of that, it hung. Not in a trace, where it may have been asked for a longer answer than all others."""
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
    """A stream that ends with an error event, or early, counts as answered for the client: its length gives it away."""
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
    """Of all prompts together: a chat template adds tokens to each, and text is not always read back as the same number
    of tokens."""
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
    """A client that falls behind asks less of the deployment than the result claims, and one that hurries asks more."""
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
