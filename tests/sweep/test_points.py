"""Points and their order: one start for each distinct recipe, the same id for the same point, an honest estimate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pdserve.bench.validity import BenchVerdict, Reason
from pdserve.sweep.file import (
    Point,
    Settings,
    Sweep,
    by_deployment,
    combinations,
    load_sweep,
    points,
    resolve,
)
from pdserve.sweep.record import record_of
from pdserve.sweep.run import estimate
from tests.launch.deployment import REPOSITORY
from tests.sweep.kit import RECIPE, SWEEP, record
from tests.sweep.test_compare import INVALID, measured, result

SHORT, LONG = {"input_tokens": 8, "output_tokens": 4}, {"input_tokens": 64, "output_tokens": 4}


def sweep(**changes: Any) -> Sweep:
    values = {"schema": 1, "name": "s", "recipe": "r.yaml", "workload": [SHORT], "concurrency": [1, 4], **changes}
    return Sweep.model_validate(values)


def planned(some: Sweep, same: Mapping[Settings, str] | None = None) -> tuple[Point, ...]:
    """With a recipe of its own for each combination, but for those of `same`."""
    digests = [(settings, (same or {}).get(settings, str(settings))) for settings in combinations(some)]
    return points(some, digests)


def titles(some: Sequence[Point]) -> list[str]:
    return [f"{point.deployment.title}; {point.load.title}" for point in some]


def test_zip_goes_first_with_first_and_cross_each_with_each() -> None:
    some = sweep(zip={"p": [1, 2], "d": [3, 4]}, cross={"c": [None, {"kind": "x"}]})
    assert combinations(some) == (
        (("p", "1"), ("d", "3"), ("c", "null")),
        (("p", "1"), ("d", "3"), ("c", "{kind: x}")),
        (("p", "2"), ("d", "4"), ("c", "null")),
        (("p", "2"), ("d", "4"), ("c", "{kind: x}")),
    )


def test_a_deployment_is_started_once_for_all_of_its_workloads_and_loads() -> None:
    some = planned(sweep(workload=[SHORT, LONG], rate=[0.5], cross={"c": [1, 2, 3]}))
    assert len(some) == 3 * 2 * 3
    assert [deployment.title for deployment, _ in by_deployment(some)] == ["c=1", "c=2", "c=3"]


def test_settings_that_mean_the_same_recipe_are_the_same_deployment() -> None:
    some = sweep(cross={"c": ["default", 2, "explicit"]})
    first, _, third = combinations(some)
    made = planned(some, {first: "same", third: "same"})
    assert titles(made) == [
        "c=default; concurrency 1",
        "c=default; concurrency 4",
        "c=2; concurrency 1",
        "c=2; concurrency 4",
    ]


def test_a_point_keeps_its_id_when_others_are_added_and_gets_another_one_with_other_work() -> None:
    before = {point.id for point in planned(sweep(cross={"c": [2]}))}
    after = {point.id for point in planned(sweep(cross={"c": [1, 2]}, concurrency=[1, 2, 4]))}
    assert before < after
    assert not before & {point.id for point in planned(sweep(cross={"c": [2]}, workload=[LONG]))}


def test_the_estimate_is_of_points_with_the_same_work_and_load_and_counts_the_others() -> None:
    one, four, other_one, other_four = planned(sweep(cross={"c": [1, 2]}))
    assert estimate([one], [], 1).unknown_points == 1
    left = estimate([four, other_one, other_four], [record(one, 10.0, start=30.0)], 2)
    assert (left.seconds, left.unknown_points, left.unknown_starts) == (10.0 + 2 * 30.0, 2, 0)


def test_the_example_turns_lmcache_off_and_on_with_a_start_each_under_fixed_prompts_and_a_trace() -> None:
    planned = resolve(load_sweep(REPOSITORY / "sweeps" / "cache-tiny-cpu.yaml"), {})
    assert [recipe.recipe.lmcache is not None for recipe in planned.recipes.values()] == [False, True]
    assert (len(planned.points), len(by_deployment(planned.points))) == (2 * 2 * 3, 2)
    assert {point.work for point in planned.points} == {"1024 in, 32 out", "trace agentic-tiny"}
    assert {point.workload.client_for(point.load) for point in planned.points} == {"aiperf"}
    assert planned.name == "tiny-cpu"


def test_a_trace_brings_its_own_requests_and_its_digest_is_part_of_the_point(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"input_length": 3}\n' * 5)
    (tmp_path / "r.yaml").write_text("")
    file = tmp_path / "s.yaml"
    workload = "[{trace: t.jsonl}, {input_tokens: 8, output_tokens: 4}]"
    file.write_text(f"schema: 1\nname: s\nrecipe: r.yaml\nconcurrency: [2]\nrequests: 7\nworkload: {workload}\n")

    def made() -> tuple[Point, ...]:
        loaded = load_sweep(file)
        return points(loaded.sweep, [((), "d")], loaded.traces)

    first, second = made()
    assert (first.load.requests, second.load.requests) == (5, 7)
    assert first.work == "trace t.jsonl"
    trace.write_text('{"input_length": 4}\n' * 5)
    changed, same = made()
    assert changed.id != first.id, "another trace is another point"
    assert same.id == second.id


def test_a_point_is_the_same_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("here", "beside"):
        (tmp_path / name).mkdir()
    (tmp_path / "here" / "r.yaml").write_text(RECIPE)
    (tmp_path / "here" / "s.yaml").write_text(SWEEP)
    (tmp_path / "beside" / "s.yaml").write_text(SWEEP.replace("r.yaml", "../here/r.yaml"))

    def ids(folder: str, file: str) -> list[str]:
        monkeypatch.chdir(tmp_path / folder)
        return [point.id for point in resolve(load_sweep(Path(file)), {}).points]

    whole = ids("here", str(tmp_path / "here" / "s.yaml"))
    assert ids("here", "s.yaml") == whole
    assert ids("beside", "../here/s.yaml") == whole
    assert ids("beside", "s.yaml") == whole


def test_a_point_counts_where_each_of_its_measurements_does() -> None:
    point, _ = planned(sweep())

    def verdict(*verdicts: BenchVerdict | None) -> tuple[str, tuple[Reason, ...]]:
        some = result(*(measured(0.1, each) for each in verdicts))
        record = record_of(point, some, caches={}, attempt="a", start_seconds=None, seconds=1.0)
        return record.status, record.reasons

    assert verdict(None, None) == ("VALID", ())
    assert verdict(None, INVALID, INVALID) == ("INVALID", INVALID.reasons)
