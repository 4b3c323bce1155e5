"""What pdserve's proxy is to reach, as ratios to vllm-router in the same run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.proxy.results import Sample, Summary, pairs, summarise
from benchmarks.proxy.scenarios import ADMISSION

OURS, REFERENCE = "pdserve", "vllm-router"
STREAMS = ("streams-64-paced", "streams-64-saturated", "streams-512-paced", "streams-512-saturated")
SAVED_SHARE = 0.9
"""Of decode's admission time that concurrent dispatch must save: timers of the mock are good to a millisecond."""
EQUAL = 0.99
"""A delivered rate from here on counts as equal: at a given rate of offers it varies by that much between visits."""


@dataclass(frozen=True)
class Goal:
    """One line of the verdict. `value` is a ratio to the reference, or what `unit` says."""

    name: str
    scenario: str
    figure: str
    limit: float
    at_most: bool
    ours: float
    reference: float | None
    value: float
    unit: str = "x"

    @property
    def passed(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit


RATIOS = (
    ("CPU per request", "requests", "cpu_ms_per_request", 0.6, True),
    ("requests/s", "requests", "requests_per_s", 1.0, False),
    ("CPU at a 100 kB body", "body-100kB", "cpu_ms_per_request", 0.6, True),
    ("CPU at a 1 MB body", "body-1MB", "cpu_ms_per_request", 0.5, True),
    *(("CPU per chunk", name, "cpu_s_per_1000_chunks", 1.0, True) for name in STREAMS[:-1]),
    ("CPU per chunk", STREAMS[-1], "cpu_s_per_1000_chunks", 0.9, True),
    *(("delivered chunk rate", name, "delivered_per_s", EQUAL, False) for name in STREAMS),
    *(("p99 chunk delay", name, "delay_p99_ms", 1.5, True) for name in STREAMS),
    ("added TTFT p50, no prefill time", "ttft", "added_ttft_p50_ms", 1.0, True),
    ("memory at 512 streams", "streams-512-paced", "rss_streams_mib", 0.4, True),
    ("memory at 512 streams", "streams-512-saturated", "rss_streams_mib", 0.4, True),
)


def judge(samples: Sequence[Sample], soak: Iterable[dict[str, Any]] = ()) -> list[Goal]:
    """Every goal that this run can judge: one whose figures it does not have is left out.

    Judged by the median of the ratios within a visit: a core of a shared host is up to 1.8 times as fast in one
    second as in another. Rates by the ratio of the means: one chunk more or less of a paced stream is 3 % of what a
    visit sees of it. Who delivers more than is offered counts as one that delivers that. What is added to the
    baseline can be zero or less, and is judged by the ratio of the medians.
    """
    summary = summarise(samples)
    judged = []
    for name, scenario, figure, limit, at_most in RATIOS:
        ours, reference = _pair(summary, scenario, figure)
        if ours is None or reference is None or reference <= 0:
            continue
        both = [pair for pair in pairs(samples, scenario, figure, OURS, REFERENCE) if pair[1] > 0]
        if figure.startswith("added_") or not both:
            value = ours / reference
        elif figure.endswith("_per_s"):
            # A window that is 35 chunks of a paced stream long has 36 when one comes at each of its ends.
            offers = [offer for offer, _ in pairs(samples, scenario, "offered_per_s", OURS, REFERENCE)]
            most = sum(offers) if figure == "delivered_per_s" else math.inf
            value = min(most, sum(one for one, _ in both)) / min(most, sum(other for _, other in both))
        else:
            value = statistics.median(one / other for one, other in both)
        judged.append(Goal(name, scenario, figure, limit, at_most, ours, reference, value))
    ours, reference = _pair(summary, "ttft-prefill", "added_ttft_p50_ms")
    if ours is not None and reference is not None:
        limit = SAVED_SHARE * ADMISSION * 1e3
        name = "TTFT p50 below the reference's, with prefill time"
        judged.append(
            Goal(name, "ttft-prefill", "added_ttft_p50_ms", limit, False, ours, reference, reference - ours, unit="ms")
        )
    for row in soak:
        if row["system"] == OURS:
            for name in ("requests", "streams"):
                judged.append(
                    Goal(
                        f"memory growth over {row[name]:,} {name}", "soak", f"growth_{name}", row["limit"], True,
                        row[f"rss_after_{name}_mib"], None, row[f"growth_{name}_mib"], unit="MiB",
                    )
                )  # fmt: skip
    return judged


def _pair(summary: Summary, scenario: str, figure: str) -> tuple[float | None, float | None]:
    systems = summary.get(scenario, {})
    return systems.get(OURS, {}).get(figure), systems.get(REFERENCE, {}).get(figure)
