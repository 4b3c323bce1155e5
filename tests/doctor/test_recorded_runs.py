"""The causes in runs of real deployments: what has to be found is, and nothing else.

A folder of tests/fixtures/runs is a run directory as `pdserve down` left it, with the live figures of before
(live.json). Paths, hosts and tokens were replaced, and lines that repeat left out. All ran on CPU, with vllm 0.32.0,
lmcache 0.5.6 and mooncake 0.3.13.post1; `throttled` and `saturated` with the engines of tests/fakes.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter

from pdserve.doctor.read_run import read_logs, read_run
from pdserve.doctor.records import Diagnosis, LiveFigures
from pdserve.doctor.rules import diagnose
from pdserve.run.directory import RunDir
from tests.tables import each_row

LIVE = TypeAdapter(LiveFigures)
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


def said_of(recorded: RecordedRun, folder: Path) -> list[Diagnosis]:
    """The folder's name is a run's, so that nothing is written into the repository."""
    copy = folder / "20261125-000000-000000"
    shutil.copytree(RUNS / recorded.name, copy)
    records = read_run(RunDir(copy))
    assert not records.unread
    if recorded.alive:
        live = LIVE.validate_json((copy / "live.json").read_bytes())
        records = replace(records, live=live, alive=True, phase="ready")
    return diagnose(records, read_logs(RunDir(copy), records))


@each_row("recorded", RECORDED)
def test_what_is_said_of_a_recorded_run(recorded: RecordedRun, tmp_path: Path) -> None:
    said = said_of(recorded, tmp_path)
    assert {(each.rule, process) for each in said for process in each.processes or ("",)} == recorded.said
    assert any(recorded.words in each.cause for each in said) or not recorded.words, [each.cause for each in said]


def test_every_recorded_run_has_its_expectation_and_its_row_in_the_document() -> None:
    folders = {path.name for path in RUNS.iterdir()}
    assert folders == {each.name for each in RECORDED}


@each_row("place", ["/root/", "/home/", "/tmp/p"])
def test_no_recorded_run_names_a_place_of_its_machine(place: str) -> None:
    files = [path for path in RUNS.rglob("*") if path.is_file()]
    assert [path.name for path in files if place in path.read_text()] == []
