"""Two results beside each other: what differs comes first, and noise is not called a change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdserve.bench.figures import figures
from pdserve.bench.result import BenchResult, Measurement, Provenance, Window, new_folder, read_result
from pdserve.bench.validity import BenchVerdict, Reason
from pdserve.bench.workload import Load, Workload
from pdserve.cli.compare import compare as run
from pdserve.errors import StateError
from pdserve.sweep.compare import Comparison, FigureChange, compare, judge_change, quantile
from tests.bench.evidence import healthy, record
from tests.tables import each_row

INVALID = BenchVerdict(status="INVALID", reasons=(Reason(check="errors", text="no"),))


def measured(ttft: float, verdict: BenchVerdict | None = None, concurrency: int = 4) -> Measurement:
    evidence = healthy()
    return Measurement(
        load=Load(requests=20, concurrency=concurrency),
        repeat=0,
        verdict=verdict or BenchVerdict(status="VALID"),
        figures=figures([record(ttft=ttft)], gpus=2, slo={}),
        window=Window(),
        before=evidence.before,
        after=evidence.after,
        raw="",
        log="",
    )


def result(*measurements: Measurement, workload: Workload | None = None, **about: Any) -> BenchResult:
    values: dict[str, Any] = {
        "deployment": "d",
        "run_id": "r",
        "began": 1.0,
        "client": "vllm bench serve",
        "tokenizer": "/m",
        "versions": {"vllm": "0.32.0"},
        "hardware": {"cpus": "2"},
        "recipe": "name: d\nprefill:\n  instances: 1\n",
    }
    return BenchResult(
        provenance=Provenance(**(values | about)),
        workload=workload or Workload(input_tokens=10, output_tokens=5),
        measurements=measurements,
    )


def changes(comparison: Comparison) -> dict[str, FigureChange]:
    """Of the only load."""
    (point,) = comparison.points
    return {change.figure: change for change in point.changes}


def judgement(a: BenchResult, b: BenchResult, figure: str = "TTFT mean") -> str:
    return changes(compare(a, b))[figure].judgement


def three(*ttfts: float) -> BenchResult:
    return result(*map(measured, ttfts))


def test_versions_hardware_and_recipe_that_differ_are_named() -> None:
    other = result(
        versions={"vllm": "0.33.0", "nixl": "1"},
        hardware={"cpus": "4"},
        planned={"decode: blocks of a rank": "2048"},
        recipe="name: d\nprefill:\n  instances: 2\n",
        tokenizer="org/m",
    )
    differences = [(each.what, each.a, each.b) for each in compare(result(), other).differences]
    assert differences == [
        ("version of vllm", "0.32.0", "0.33.0"),
        ("version of nixl", None, "1"),
        ("hardware: cpus", "2", "4"),
        ("planned: decode: blocks of a rank", None, "2048"),
        ("recipe: prefill.instances", "1", "2"),
        ("tokenizer of the client", "/m", "org/m"),
    ]


def test_the_same_result_differs_in_nothing() -> None:
    same = three(0.10, 0.11, 0.12)
    comparison = compare(same, same)
    assert not comparison.differences
    assert {change.judgement for change in changes(comparison).values()} == {"within noise"}


def test_a_change_beyond_the_noise_is_real() -> None:
    assert judgement(three(0.100, 0.101, 0.102), three(0.200, 0.201, 0.202)) == "real"


def test_a_change_within_the_noise_is_not() -> None:
    """The mean is 20 % higher, and single repeats spread by as much."""
    assert judgement(three(0.08, 0.10, 0.12), three(0.10, 0.12, 0.14)) == "within noise"


def test_single_measurements_are_never_called_a_change() -> None:
    assert judgement(result(measured(0.1)), result(measured(9.0))) == "not judged"


def test_a_trifle_is_no_change_even_where_the_repeats_do_not_spread() -> None:
    assert judge_change([1.0, 1.0], [1.0000001, 1.0000001]) == (0.0, "within noise")
    assert judge_change([1.0, 1.0], [1.0009, 1.0009])[1] == "within noise"
    assert judge_change([1.0, 1.0], [1.002, 1.002])[1] == "real"
    assert judge_change([0.0, 0.0], [3.0, 3.0])[1] == "real", "of nothing to something"
    assert judge_change([-1.0, -1.0], [-1.5, -1.5])[1] == "real"
    assert judge_change([1.0, 1.0], [1.0, 1.0]) == (0.0, "within noise")


def test_invalid_repeats_are_left_out_and_named() -> None:
    a = result(measured(0.1), measured(0.11), measured(5.0, INVALID))
    comparison = compare(a, three(0.1, 0.11, 0.12))
    assert comparison.left_out == ("concurrency 4, 20 requests: 1 of 3 repeats of A are INVALID (errors)",)
    assert changes(comparison)["TTFT mean"].a == pytest.approx(105)


def test_a_load_that_is_in_one_result_only_is_named() -> None:
    comparison = compare(result(measured(0.1)), result(measured(0.1, concurrency=8)))
    assert not comparison.points
    assert len(comparison.left_out) == 2


@each_row("change", [{"input_tokens": 11}, {"output_tokens": 6}, {"seed": 1}, {"slo": {"ttft": 5}}])
def test_different_work_is_not_compared(change: dict[str, Any]) -> None:
    other = Workload(**{"input_tokens": 10, "output_tokens": 5, **change})
    with pytest.raises(StateError, match="different work"):
        compare(result(), result(workload=other))


def with_grace(seconds: float | None) -> BenchResult:
    load = Load(requests=20, concurrency=4, seconds=60, grace_seconds=seconds)
    return result(*[measured(0.1).model_copy(update={"load": load})] * 2)


def test_a_load_whose_open_requests_have_less_grace_is_another_load() -> None:
    """What is cut is in no figure: without grace the long answers are missing."""
    compared = compare(with_grace(300), with_grace(0))
    assert compared.points == ()
    assert compared.left_out[0] == "concurrency 4, 20 requests, 60 s, 300 s of grace: B has no measurement of it"
    assert compare(with_grace(None), with_grace(30)).points, "the usual one, named or not"
    assert compare(with_grace(30), result(measured(0.1))).points == (), "one that ends by time is another"


def test_what_the_engines_counted_is_compared_too() -> None:
    """A cache that is lost may cost no time on an idle machine."""

    def with_hits(share: float, written: float = 7.0) -> Measurement:
        window = Window(
            prefill={"computed": 1000 * (1 - share), "local_hits": 1000 * share}, lmcache={"written": written}
        )
        return measured(0.1).model_copy(update={"window": window})

    a, b = result(*[with_hits(0.9)] * 2), result(*[with_hits(0.0, 9.0)] * 2)
    found = changes(compare(a, b))
    assert found["TTFT mean"].shown == "within noise"
    assert (found["prefix hit"].a, found["prefix hit"].b, found["prefix hit"].shown) == (90, 0, "real: worse")
    assert found["computed on prefill"].shown == "real: worse"
    assert (found["chunks stored"].shown, found["chunks stored"].better) == ("real: more", None)


def test_two_starts_of_the_same_recipe_are_named_as_that_with_the_noise_that_is_not_known() -> None:
    a, b = three(0.100, 0.101, 0.102), three(0.200, 0.201, 0.202)
    again = b.model_copy(update={"provenance": b.provenance.model_copy(update={"run_id": "s"})})
    assert compare(a, b).differences == ()
    assert "one start" not in compare(a, b).verdict
    (only,) = compare(a, again).differences
    assert (only.what, only.a, only.b) == ("another start of the deployment", "r", "s")
    assert "what changes from start to start is not in the noise" in compare(a, again).verdict


def test_what_is_asked_of_the_client_beside_the_work_is_a_difference() -> None:
    cold = Workload(input_tokens=10, output_tokens=5, warmup=0)
    (only,) = compare(result(measured(0.1), workload=cold), result(measured(0.1))).differences
    assert (only.what, only.a, only.b) == ("workload: warmup", "0", "8")


def stored(root: Path, bench_id: str, content: str) -> Path:
    folder = new_folder(root, "d", bench_id)
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(content)
    return folder


def test_a_result_is_read_by_id_folder_and_file(tmp_path: Path) -> None:
    whole = three(0.1, 0.2)
    folder = stored(tmp_path, "20260101-000000-abcdef", whole.model_dump_json())
    for which in (folder.name, str(folder), str(folder / "result.json")):
        assert read_result(tmp_path, which) == whole


@each_row("content, what", [("", "is damaged"), ('{"schema_version": 2}', "was written by another version")])
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, content: str, what: str) -> None:
    folder = stored(tmp_path, "x", content)
    with pytest.raises(StateError, match=rf"this result\.json {what}"):
        read_result(tmp_path, str(folder))


def test_an_unknown_id_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    stored(tmp_path, "20260101-000000-abcdef", "{}")
    with pytest.raises(StateError) as refused:
        read_result(tmp_path, "20260202")
    assert "20260101-000000-abcdef" in refused.value.render()


def test_the_terminal_begins_with_what_differs(pdserve_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored(pdserve_home, "a", three(0.08, 0.10, 0.12).model_dump_json())
    stored(pdserve_home, "b", three(0.10, 0.12, 0.14).model_copy().model_dump_json())
    run("a", "b")
    output = capsys.readouterr().out
    assert output.index("the same versions, hardware and recipe") < output.index("TTFT mean")
    assert "(+20.0%)" in output
    assert output.index("latencies") < output.index("rates") < output.index("0 on both sides: failed, cut")
    assert "None of " in output
    assert "within noise" in output


# --- Student's t


def test_between_two_degrees_of_freedom_the_noise_is_a_little_more_than_the_exact_one() -> None:
    """Variances 0.5 and 0.605 of two: Welch has 1.9821; the half of the interval is SciPy's."""
    noise, judgement = judge_change([100.0, 101.0], [130.0, 131.1])
    assert noise is not None
    assert 7.4902851641841455 < noise < 1.1 * 7.4902851641841455
    assert judgement == "real"
    assert (quantile(2), quantile(1000)) == (9.925, 2.750)
