"""`pdserve import` as it is typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.recipe.load.loader import load_recipe
from tests.importing.kit import SCHEMA_1
from tests.messages.kit import Outcome, run
from tests.tables import each_row


def typed(folder: Path, *words: str) -> Outcome:
    return run(("import", *words), folder, {})


@pytest.fixture
def launch(tmp_path: Path) -> Path:
    path = tmp_path / "launch.yaml"
    path.write_text(SCHEMA_1)
    return path


def test_the_recipe_goes_to_stdout_and_each_value_has_its_line(launch: Path, tmp_path: Path) -> None:
    done = typed(tmp_path, "launch.yaml")
    assert done.code == 0
    written = tmp_path / "copy.yaml"
    written.write_text(done.out)
    load_recipe(written, environ={})
    line = SCHEMA_1.splitlines().index("      max-num-seqs: 64") + 1
    assert f"max-num-seqs: 64  # {line}: backend.vllm_config.decode.max-num-seqs" in done.out


def test_an_import_in_part_is_written_and_ends_with_9(launch: Path, tmp_path: Path) -> None:
    launch.write_text(f"{SCHEMA_1}setup_script: other.sh\n")
    done = typed(tmp_path, "launch.yaml", "--out", "recipe.yaml")
    assert done.code == 11
    assert "imported in part: one value was not carried over" in done.err
    assert "setup_script: what it does is not known" in done.err
    load_recipe(tmp_path / "recipe.yaml", environ={})


def test_nothing_is_overwritten(launch: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("mine")
    done = typed(tmp_path, "launch.yaml", "-o", "recipe.yaml")
    assert done.code == 2
    assert (tmp_path / "recipe.yaml").read_text() == "mine"


def test_a_recipe_that_is_its_source_is_told_apart_from_one_that_departs(launch: Path, tmp_path: Path) -> None:
    assert typed(tmp_path, "launch.yaml", "-o", "recipe.yaml").code == 0
    check = ("--check", "recipe.yaml", "--against", "launch.yaml")
    assert typed(tmp_path, *check).code == 0
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("max-num-seqs: 64", "max-num-seqs: 32"))
    done = typed(tmp_path, *check)
    assert done.code == 11
    assert "decode.args.max-num-seqs: 32 (recipe.yaml:" in done.err
    assert "in the source 64 (line " in done.err


def test_where_a_value_is_written_makes_no_difference(launch: Path, tmp_path: Path) -> None:
    assert typed(tmp_path, "launch.yaml", "-o", "recipe.yaml").code == 0
    recipe = tmp_path / "recipe.yaml"
    lines = [line for line in recipe.read_text().splitlines() if "max-model-len" not in line or line.startswith("#")]
    lines[lines.index("engine:")] = "engine:\n  args: {max-model-len: 4096}"
    recipe.write_text("\n".join(lines) + "\n")
    assert typed(tmp_path, "--check", "recipe.yaml", "--against", "launch.yaml").code == 0


def test_a_recipe_that_pdserve_refuses_is_not_written(launch: Path, tmp_path: Path) -> None:
    launch.write_text(SCHEMA_1.replace("max-num-seqs: 64", "gpu-memory-utilization: 90"))
    done = typed(tmp_path, "launch.yaml", "-o", "recipe.yaml")
    assert done.code == 2
    assert "write 0.9" in done.err
    assert not (tmp_path / "recipe.yaml").exists()


@each_row("words", [(), ("missing.yaml",), ("--check", "launch.yaml"), ("launch.yaml", "-o", "no/folder.yaml")])
def test_a_wrong_command_line_ends_with_2(launch: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    assert typed(tmp_path, *words).code == 2
