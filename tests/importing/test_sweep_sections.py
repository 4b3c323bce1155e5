"""Files of srt-slurm with several deployments, as a recipe and a sweep file over it: nothing is left out in silence."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdserve.cli.commands import app
from pdserve.errors import RecipeError, SourceDifferenceError
from pdserve.importing.formats import import_variants
from pdserve.importing.recipe_text import line
from pdserve.importing.sweep_draft import SweepDraft
from pdserve.operations.import_recipe import check_whole
from pdserve.sweep.file import load_sweep, resolve
from pdserve.sweep.imported import ImportedSweep, import_sweep, write_sweep
from tests.importing.kit import SCHEMA_1, SCHEMA_2, read, refused
from tests.tables import each_row

BENCH = "benchmark: {type: sa-bench, isl: 1024, osl: 64, concurrencies: [4, 8], req_rate: inf}\n"
PLAIN = SCHEMA_1.replace("benchmark:\n  type: sa-bench\n  isl: 1024\n", BENCH)
BASE = f"base:\n{textwrap.indent(PLAIN, '  ')}"
OVERRIDE = "override_small:\n  backend: {vllm_config: {decode: {max-num-seqs: 8}}}\n"
ZIP = """\
zip_override_seqs:
  backend:
    vllm_config:
      decode:
        max-num-seqs: [16, 32]
        block-size: [128]
  benchmark:
    concurrencies: [[4], [8, 16]]
"""


def draft(text: str) -> SweepDraft:
    found = import_variants(text, "launch.yaml")
    assert found is not None
    return found


def made(folder: Path, text: str) -> ImportedSweep:
    file = folder / "launch.yaml"
    file.write_text(text)
    found = import_sweep(file, folder / "recipe.yaml", folder / "sweep.yaml", {})
    (folder / "recipe.yaml").write_text(found.recipe)
    (folder / "sweep.yaml").write_text(found.sweep)
    return found


def test_an_override_is_laid_over_the_base_and_null_removes() -> None:
    gone = "{max-model-len: null}"
    over = OVERRIDE.replace("decode: {max-num-seqs: 8}", f"prefill: {gone}, decode: {{max-num-seqs: 8, {gone[1:]}")
    found = read(f"{BASE}{over}  name: other\n", "override_small")
    assert found.document["name"] == "other"
    assert found.document["decode"]["args"] == {"max-num-seqs": 8}
    assert found.origins["decode", "args", "max-num-seqs"].startswith(f"{len(BASE.splitlines()) + 2}: ")


@each_row("index, seqs, sizes", [(0, 16, [1, 2]), (1, 32, [4])])
def test_lists_of_a_zip_override_are_walked_side_by_side(index: int, seqs: int, sizes: list[int]) -> None:
    text = ZIP.replace("block-size: [128]", "block-size: [128]\n        cudagraph-capture-sizes: [[1, 2], [4]]")
    args = read(BASE + text, f"zip_override_seqs[{index}]").document["decode"]["args"]
    assert args == {"max-num-seqs": seqs, "max-model-len": 4096, "block-size": 128, "cudagraph-capture-sizes": sizes}


def test_a_file_with_several_deployments_asks_for_one_unless_all_serve_the_same() -> None:
    todo = str(refused(BASE + OVERRIDE + ZIP).todo)
    for name in ("base", "override_small", "zip_override_seqs[0]", "zip_override_seqs[1]"):
        assert name in todo
    assert "no variant" in refused(BASE, "override_other").what
    same = read(BASE + "override_bench:\n  benchmark: {isl: 8192}\n")
    assert same.document["decode"] == read(PLAIN).document["decode"]
    swept = PLAIN.replace("max-num-seqs: 64", 'max-num-seqs: "{seqs}"') + "sweep: {seqs: [4, 8], isl: [1]}\n"
    assert "seqs=4,isl=1" in str(refused(swept).todo)
    assert read(swept, "seqs=8,isl=1").document["decode"]["args"]["max-num-seqs"] == 8


def test_a_sweep_fills_its_placeholders_and_each_combination_is_a_deployment(tmp_path: Path) -> None:
    text = PLAIN.replace("max-num-seqs: 64", 'max-num-seqs: "{seqs}"').replace(
        "max-model-len: 4096", "max-model-len: 9"
    )
    found = made(tmp_path, text + "sweep: {seqs: [4, 8, 16]}\n")
    planned = resolve(load_sweep(tmp_path / "sweep.yaml"), {})
    assert found.draft.losses() == []
    assert [
        recipe.recipe.decode.args["max-num-seqs"] for recipe in planned.recipes.values() if recipe.recipe.decode
    ] == [4, 8, 16]
    assert found.points == 6
    assert {(point.work, point.load.concurrency) for point in planned.points} == {
        ("1024 in, 64 out", 4),
        ("1024 in, 64 out", 8),
    }
    assert "  2: seqs=8\n" in found.sweep.replace("# ", "")


def test_overrides_are_points_and_the_base_is_none_as_srtctl_has_it(tmp_path: Path) -> None:
    found = made(tmp_path, BASE + OVERRIDE + ZIP)
    assert [name for name, _ in found.draft.deployments] == [
        "override_small",
        "zip_override_seqs[0]",
        "zip_override_seqs[1]",
    ]
    assert found.draft.document["zip"] == {
        "decode.args.max-num-seqs": [8, 16, 32],
        "decode.args.block-size": [None, 128, 128],
    }
    notes = [line(note) for note in found.draft.notes]
    assert any("base: srtctl runs it only when it is asked for" in note for note in notes)
    assert any("the file measures 5 points; a sweep has every load on every deployment: 9" in note for note in notes)


@each_row("before, section, what", [
    (PLAIN, "sweep: {seqs: []}\n", "sweep.seqs has no value"),
    (BASE, "zip_override_a: [1]\n", "zip_override_a is no mapping"),
    (BASE, "zip_override_x:\n  a: {b: [1, 2], c: [1, 2, 3]}\n", "the lists of zip_override_x have different"),
    (BASE, "zip_override_x:\n  a: {b: 1}\n", "zip_override_x has no list"),
])  # fmt: skip
def test_a_section_that_gives_no_variant_is_refused_with_its_line(before: str, section: str, what: str) -> None:
    for importing in (draft, read):
        with pytest.raises(RecipeError) as raised:
            importing(before + section)
        assert f"launch.yaml:{len(before.splitlines()) + 1}: {what}" in raised.value.render()


@each_row("benchmark, said, effect", [
    ("{type: gsm8k}", "the benchmark is gsm8k", "confirm"),
    ("{type: sa-bench, isl: 8, osl: 8}", "workload and loads are the usual ones", "confirm"),
    (f"{BENCH[11:-2]}, random_range_ratio: 0.8}}", "varies the lengths", "replaced"),
    # sa-bench gives its client both limits at once (srt-slurm, benchmarks/scripts/sa-bench/bench.sh).
    (BENCH[11:-1].replace("inf", "2"), "the most at a time of req_rate 2", "confirm"),
    (BENCH[11:-1].replace("[4, 8]", "[4, 8a, 0]"), "no number of requests: 8a, 0", "confirm"),
])  # fmt: skip
def test_what_is_measured_otherwise_is_named(benchmark: str, said: str, effect: str) -> None:
    text = PLAIN.replace(BENCH, f"benchmark: {benchmark}\n") + "sweep: {unused: [1]}\n"
    notes = draft(text).notes
    assert [note.effect for note in notes if said in note.why] == [effect]
    assert any("nothing has {unused}" in note.why for note in notes)


def test_a_variant_that_is_no_recipe_is_named_and_the_others_are_points(tmp_path: Path) -> None:
    variant, what = "override_other:\n  backend: {type: sglang}\n", "the engine is sglang"
    found = made(tmp_path, BASE + OVERRIDE + variant)
    assert [name for name, _ in found.draft.deployments] == ["override_small"]
    with pytest.raises(SourceDifferenceError) as raised:
        check_whole(found.draft.losses(), tmp_path / "launch.yaml")
    assert f"override_other: it is no point: {what}" in raised.value.render()
    with pytest.raises(RecipeError, match=what):
        draft(BASE + variant)


def test_where_one_file_cannot_be_written_neither_is(tmp_path: Path) -> None:
    (tmp_path / "launch.yaml").write_text(PLAIN + "sweep: {unused: [1]}\n")
    paths = tmp_path / "r.yaml", tmp_path / "nowhere" / "s.yaml"
    found = import_sweep(tmp_path / "launch.yaml", *paths, {})
    with pytest.raises(RecipeError):
        write_sweep(found, *paths)
    assert [path.name for path in tmp_path.iterdir()] == ["launch.yaml"]


def test_the_verb_writes_both_files_and_overwrites_none(tmp_path: Path) -> None:
    file = tmp_path / "launch.yaml"
    file.write_text(BASE + OVERRIDE + ZIP)
    recipe, sweep = tmp_path / "r.yaml", tmp_path / "s.yaml"
    words = ["import", str(file), "--out", str(recipe), "--sweep", str(sweep)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "9 points on 3 deployments" in done.stdout
    assert load_sweep(sweep).recipe == recipe
    again = CliRunner().invoke(app, words)
    assert isinstance(again.exception, RecipeError)
    assert "there already" in again.exception.render()
    assert CliRunner().invoke(app, words[:2] + words[4:]).exit_code == 2, "without --out"


def test_a_file_with_one_deployment_is_no_sweep(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="describes no sweep"):
        made(tmp_path, PLAIN)


def test_a_key_beside_the_base_that_is_no_variant_is_named() -> None:
    """A slip in `override_` would lose a deployment in silence."""
    slip = OVERRIDE.replace("override_small", "overide_big")
    assert [note.effect for note in draft(BASE + OVERRIDE + slip).notes if note.at.key == "overide_big"] == ["confirm"]


def test_a_variant_whose_difference_is_not_carried_over_is_named() -> None:
    setup = OVERRIDE.replace("small", "setup").rstrip() + "\n  host_setup: [modprobe x]\n"
    why = "override_setup: no deployment of its own: what was carried over of it is the same as of override_small"
    assert any(why in line(note) for note in draft(BASE + OVERRIDE + setup).notes)


def test_a_schema_beside_the_base_is_that_of_every_variant() -> None:
    bare = SCHEMA_2.replace("schema: 2\n", "")
    base = f"base:\n{textwrap.indent(bare, '  ')}override_a: {{environment: {{A: b}}}}\n"
    assert draft("schema: 2\n" + base).recipe.format == "srt-slurm, schema 2"
    with pytest.raises(RecipeError, match="schema 3 of srt-slurm is not known"):
        draft("schema: 3\n" + base)
