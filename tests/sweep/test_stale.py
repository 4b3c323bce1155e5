"""Points that are over, and do not stand: without their result, or measured with what is not here any more."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pdserve.bench.result import (
    CLIENT_CODE,
    MODEL_FILES,
    RESULT,
    BenchResult,
    circumstances,
    differences,
    fixed_circumstances,
    machine,
)
from pdserve.cli.sweep import ArrayOptions
from pdserve.cli.sweep import run_sweep as run
from pdserve.models.files import model_identity
from pdserve.preflight.facts import own_pdserve
from pdserve.sweep.file import PlannedSweep
from pdserve.sweep.record import SweepFolder
from pdserve.sweep.run import GONE, SweepOptions, points_to_run, stale_points
from tests.sweep import kit
from tests.sweep.kit import record
from tests.sweep.test_compare import measured, result
from tests.tables import each_row

RECIPE = (
    kit.RECIPE.replace("cuda\ndevices_per_node: 8", "cpu").replace("id: org/small", "path: model")
    + "slurm: {partition: p}\n"
)
OPTIONS = SweepOptions(None, None, 60.0)
HERE = {"vllm": "0.32.0", "pdserve": "0.1.0 (aa)", "CPU": "new", "GPUs": "H100", MODEL_FILES: "m1"}


def planned(folder: Path) -> PlannedSweep:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"architectures": []}')
    return kit.planned(folder, "", RECIPE)


def measured_with(versions: Mapping[str, str | None], **about: Any) -> BenchResult:
    return result(measured(0.1), versions=versions, **about)


def keep(folder: SweepFolder, made: PlannedSweep, some: BenchResult) -> None:
    """As the result of each point."""
    for point in made.points:
        attempt = folder.point(point) / "r"
        attempt.mkdir(parents=True)
        (attempt / RESULT).write_text(some.model_dump_json())
        folder.write(point, record(point, 1.0))


def stale(made: PlannedSweep, folder: SweepFolder, *, measured_here: bool = True) -> Mapping[str, str]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("pdserve.sweep.run.circumstances_here", lambda *_: HERE)
        return stale_points(made, folder, measured_here=measured_here)


def test_a_valid_point_whose_result_is_gone_or_damaged_is_measured_again(tmp_path: Path) -> None:
    made, folder = planned(tmp_path), SweepFolder(tmp_path / "sweep")
    keep(folder, made, measured_with({"vllm": "0.32.0"}))
    assert points_to_run(made, folder, stale(made, folder), retry=False) == ()
    first, second = made.points
    (folder.point(first) / "r" / RESULT).unlink()
    (folder.point(second) / "r" / RESULT).write_text('{"schema_version": 1, "prov')
    found = stale(made, folder)
    assert found == {first.id: GONE, second.id: GONE}
    assert points_to_run(made, folder, found, retry=False) == (first, second)
    assert stale(made, folder, measured_here=False) == found, "of that no node has to be asked"


@each_row("changes, why", [
    ({"versions": {"vllm": "0.31.0"}}, "measured with vllm 0.31.0, here is 0.32.0"),
    ({"versions": {"pdserve (client)": "0.1.0 (bb)"}}, "measured with pdserve 0.1.0 (bb), here is 0.1.0 (aa)"),
    ({"hardware": {"cpu": "old"}}, "measured with CPU old, here is new"),
    ({"hardware": {"gpus": "0, A100, 1 MiB, 5"}}, "measured with GPUs A100, 1 MiB, 5, here is H100"),
    ({"planned": {MODEL_FILES: "m0"}}, f"measured with {MODEL_FILES} m0, here is m1"),
])  # fmt: skip
def test_other_circumstances_are_measured_again(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    made, folder = planned(tmp_path), SweepFolder(tmp_path / "sweep")
    keep(folder, made, measured_with(**{"versions": {}, **changes}))
    found = stale(made, folder)
    assert found == dict.fromkeys((point.id for point in made.points), why)
    assert len(points_to_run(made, folder, found, retry=False)) == 2


def test_where_the_nodes_are_others_nothing_is_compared(tmp_path: Path) -> None:
    made, folder = planned(tmp_path), SweepFolder(tmp_path / "sweep")
    keep(folder, made, measured_with({"vllm": "0.31.0"}))
    assert stale(made, folder, measured_here=False) == {}


def test_gpus_are_compared_by_kind_and_driver_whichever_of_them_a_job_shows() -> None:
    def gpus(text: str) -> str:
        return fixed_circumstances(measured_with({}, hardware={"gpus": text}).provenance)["GPUs"]

    one, driver = "0, NVIDIA H100, 81559 MiB, 570.86", "0, NVIDIA H100, 81559 MiB, 580.01"
    assert gpus(one) == gpus(f"{one}\n3, NVIDIA H100, 81559 MiB, 570.86\n")
    assert gpus(one) != gpus(driver)
    rocm = "device,Card Series,Node ID,GUID,GFX Version\ncard0,MI300X,2,111,gfx942\n"
    assert gpus(rocm) == gpus(rocm.replace("card0", "card7").replace("111", "222")) == "MI300X, gfx942"


def test_what_a_result_has_of_here_is_what_is_known_of_here() -> None:
    """Else every point would be measured again each time."""
    here = circumstances({"vllm": "1", "nixl": None, CLIENT_CODE: own_pdserve()}, machine("cpu"), "m")
    about = measured_with(
        {"vllm": "1", "pdserve (client)": own_pdserve()}, hardware=machine("cpu"), planned={MODEL_FILES: "m"}
    ).provenance
    assert fixed_circumstances(about) == here
    assert differences(fixed_circumstances(about), here) is None


def test_another_model_at_the_same_path_is_another_one(tmp_path: Path) -> None:
    assert model_identity(tmp_path / "none") is None
    assert model_identity(tmp_path) is None
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"x" * 10)
    seen = [model_identity(tmp_path)]
    (tmp_path / "README.md").write_text("not the model")
    assert model_identity(tmp_path) == seen[0]
    for name, content in (("config.json", '{"a": 1}'), ("model.safetensors", "x" * 11), ("more.safetensors", "")):
        (tmp_path / name).write_text(content)
        seen.append(model_identity(tmp_path))
    assert len(set(seen)) == len(seen)
    assert str(seen[-1]).endswith("(2 files of weights, 11 bytes)")


def test_the_plan_says_which_and_why(tmp_path: Path, pdserve_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = planned(tmp_path)
    folder = SweepFolder.of(pdserve_home, "small", "load")
    keep(folder, made, measured_with({"pdserve (client)": "0.0.1 (old)"}))
    run(tmp_path / "s.yaml", OPTIONS, dry=True, retry=False)
    said = " ".join(capsys.readouterr().out.split())
    assert f"measured again: points 1, 2: measured with pdserve 0.0.1 (old), here is {own_pdserve()}" in said
    assert "to run: 2 points" in said
    run(tmp_path / "s.yaml", OPTIONS, dry=True, retry=False, array=ArrayOptions(None, detach=False))
    said = " ".join(capsys.readouterr().err.split())
    assert "to run: 0 points" in said
