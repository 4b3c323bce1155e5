"""The causes in runs of real deployments: what has to be found is, and nothing else.

A folder of tests/fixtures/runs is a run directory as `pdserve down` left it, with the live figures of before
(live.json). Paths, hosts and tokens were replaced, and lines that repeat left out. All ran on CPU, with vllm 0.32.0,
lmcache 0.5.6 and mooncake 0.3.13.post1; `throttled` and `saturated` with the engines of tests/fakes.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter

from pdserve.doctor.read_run import read_logs, read_run
from pdserve.doctor.records import Diagnosis, LiveFigures
from pdserve.doctor.rules import diagnose
from pdserve.run.directory import RunDir
from tests.tables import each_row

LIVE = TypeAdapter(LiveFigures)
RUNS = Path(__file__).parents[1] / "fixtures" / "runs"


RECORDED = (
    ("well", True, "", ""),
    ("short-prompts", True, "cache-never-hits@aggregated-0", "150 tokens or fewer, and LMCache keeps whole chunks"),
    ("salts", True, "cache-never-hits@aggregated-0", "124 different cache_salt values"),
    # Without the live figures the reason is not in the run.
    ("salts", False, "cache-never-hits@aggregated-0", "nothing in the run shows why"),
    ("model-len", False, "process-died@decode-0", "max-model-len 400000 is more than the model's 8192"),
    (
        "past-proxy",
        True,
        "kv-never-fetched@prefill-0 transfers-failed@prefill-0",
        "the request came to prefill past the proxy",
    ),
    ("throttled", True, "cpu-throttled@proxy", "its CPU limit was reached in"),
    ("saturated", True, "proxy-saturated@proxy", "had work all the time and got"),
    ("l1-small", True, "cache-never-hits@aggregated-0", "its L1 is too small: chunks are evicted"),
    ("l1-small", False, "cache-never-hits@aggregated-0", "its L1 is too small"),
    ("agent-killed", False, "node-lost", "it was killed by SIGKILL"),
    ("decode-stopped", False, "process-silent@decode-1", "is stopped (SIGSTOP)"),
    ("worker-hangs", True, "process-silent@proxy proxy-stands-still@proxy", "stood still for 15 s"),
    ("preempt", True, "kv-memory-full@aggregated-0 preemptions@aggregated-0", "16 requests lost"),
    # vllm 0.32 counts preemptions in its metrics only.
    ("preempt", False, "kv-memory-full@aggregated-0", "up to 4 requests waited"),
    (
        "decode-killed",
        False,
        "process-died@decode-0 process-silent@decode-0 kv-never-fetched@prefill-0 requests-failed@proxy",
        "decode-0 had died or stood still",
    ),
    (
        "several-faults",
        True,
        "transfer-failed@decode-0 transfers-failed@decode-0 cache-lease-expired@lmcache-0 hash-seeds-differ@lmcache-0 "
        "cache-transfer-failed@prefill-0 transfer-failed@prefill-0 transfers-failed@prefill-0 requests-failed@proxy",
        "its read lease is shorter than the engine's queue",
    ),
)
"""Folder, whether with the live figures or as after its end, all that is said (rule@process), words of a cause."""


def said_of(name: str, folder: Path, *, alive: bool) -> list[Diagnosis]:
    """The folder's name is a run's, so that nothing is written into the repository."""
    copy = folder / "20261125-000000-000000"
    shutil.copytree(RUNS / name, copy)
    records = read_run(RunDir(copy))
    assert not records.unread
    if alive:
        live = LIVE.validate_json((copy / "live.json").read_bytes())
        records = replace(records, live=live, alive=True, phase="ready")
    return diagnose(records, read_logs(RunDir(copy), records))


@each_row("name, alive, expected, words", RECORDED)
def test_what_is_said_of_a_recorded_run(name: str, alive: bool, expected: str, words: str, tmp_path: Path) -> None:
    said = said_of(name, tmp_path, alive=alive)
    made = {f"{each.rule}@{process}" for each in said for process in each.processes}
    assert made | {each.rule for each in said if not each.processes} == set(expected.split())
    assert any(words in each.cause for each in said) or not words, [each.cause for each in said]


def test_every_recorded_run_has_its_expectation() -> None:
    assert {path.name for path in RUNS.iterdir()} == {name for name, *_ in RECORDED}
