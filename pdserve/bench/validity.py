"""When the figures of a measurement do not count.

A check that could not be made is shown beside the verdict: it proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from pdserve.bench import client_checks, deployment_checks, token_checks
from pdserve.bench.answers import Answer, Invalid, Unknown
from pdserve.bench.evidence import Evidence
from pdserve.plan.frozen import Frozen

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


CHECKS: Mapping[str, Check] = {
    "warm-up": client_checks.not_warmed_up,
    "client": client_checks.client_failed,
    "completed": client_checks.nothing_completed,
    "errors": client_checks.too_many_errors,
    "output-length": client_checks.output_lengths,
    "prompt-length": client_checks.prompt_lengths,
    "tokens": token_checks.tokens_differ,
    "decode-computed": deployment_checks.decode_computed,
    "transfers": deployment_checks.transfers_failed,
    "second-attempts": deployment_checks.second_attempts,
    "cache": deployment_checks.cache_stored_nothing,
    "cold-cache": token_checks.cache_was_warm,
    "processes": deployment_checks.process_died,
    "client-cpu": client_checks.client_saturated,
    "rate": client_checks.off_rate,
    "clock": deployment_checks.clock_jumped,
    "deployment": deployment_checks.deployment_changed,
    "other-traffic": deployment_checks.other_traffic,
}
