"""Runs of real deployments that were recorded, and what the doctor has to say of each.

A folder of tests/fixtures/runs is a run directory as `pdserve down` left it, with the live figures of before
(live.json). Paths, hosts and tokens were replaced, and lines that repeat left out. All ran on CPU, with vllm 0.32.0,
lmcache 0.5.6 and mooncake 0.3.13.post1; `throttled` and `saturated` with the engines of tests/fakes.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

RUNS = Path(__file__).parents[1] / "fixtures" / "runs"


class RecordedRun(NamedTuple):
    """One folder."""

    name: str
    said: frozenset[tuple[str, str]]
    """Rule and process of everything that is said of it."""
    words: str = ""
    """In one of the causes."""
    alive: bool = True
    """With the live figures; else as after its end."""


def run(name: str, *said: tuple[str, str], words: str = "", alive: bool = True) -> RecordedRun:
    return RecordedRun(name, frozenset(said), words, alive)


RECORDED = (
    run("well"),
    run(
        "short-prompts",
        ("cache-never-hits", "aggregated-0"),
        words="150 tokens or fewer, and LMCache keeps whole chunks",
    ),
    run("salts", ("cache-never-hits", "aggregated-0"), words="124 different cache_salt values"),
    # Without the live figures the reason is not in the run.
    run("salts", ("cache-never-hits", "aggregated-0"), words="nothing in the run shows why", alive=False),
    run(
        "model-len",
        ("process-died", "decode-0"),
        words="max-model-len 400000 is more than the model's 8192",
        alive=False,
    ),
    run(
        "past-proxy",
        ("kv-never-fetched", "prefill-0"),
        ("transfers-failed", "prefill-0"),
        words="the request came to prefill past the proxy",
    ),
    run("throttled", ("cpu-throttled", "proxy"), words="its CPU limit was reached in"),
    run("saturated", ("proxy-saturated", "proxy"), words="had work all the time and got"),
    run("l1-small", ("cache-never-hits", "aggregated-0"), words="its L1 is too small: chunks are evicted"),
    run("l1-small", ("cache-never-hits", "aggregated-0"), words="its L1 is too small", alive=False),
    run("agent-killed", ("node-lost", ""), words="it was killed by SIGKILL", alive=False),
    run("decode-stopped", ("process-silent", "decode-1"), words="is stopped (SIGSTOP)", alive=False),
    run("worker-hangs", ("process-silent", "proxy"), ("proxy-stands-still", "proxy"), words="stood still for 15 s"),
    run("preempt", ("preemptions", "aggregated-0"), ("kv-memory-full", "aggregated-0"), words="16 requests lost"),
    # vllm 0.32 counts preemptions in its metrics only.
    run("preempt", ("kv-memory-full", "aggregated-0"), words="up to 4 requests waited", alive=False),
    run(
        "decode-killed",
        ("process-died", "decode-0"),
        ("process-silent", "decode-0"),
        ("kv-never-fetched", "prefill-0"),
        ("requests-failed", "proxy"),
        words="decode-0 had died or stood still",
        alive=False,
    ),
    run(
        "several-faults",
        ("cache-lease-expired", "lmcache-0"),
        ("cache-transfer-failed", "prefill-0"),
        ("hash-seeds-differ", "lmcache-0"),
        ("transfer-failed", "prefill-0"),
        ("transfer-failed", "decode-0"),
        ("transfers-failed", "prefill-0"),
        ("transfers-failed", "decode-0"),
        ("requests-failed", "proxy"),
        words="its read lease is shorter than the engine's queue",
    ),
)
