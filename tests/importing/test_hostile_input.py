"""Odd input of an import is refused, or asked for by name; it is never a traceback."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from pdserve.errors import RecipeError, SourceDifferenceError
from pdserve.importing.choice import ImportChoice
from pdserve.importing.shell.lines import SUM, SUM_END, ScriptLimitError, commands
from pdserve.importing.shell.values import UnknownValueError, Variables, expanded, holds
from pdserve.importing.yaml_tree import read
from pdserve.operations.import_recipe import check_whole, import_file
from tests.importing import kit
from tests.tables import each_row


def test_a_character_that_yaml_forbids_is_refused() -> None:
    with pytest.raises(RecipeError, match="not YAML"):
        read("a: 1\n\0", "file.yaml")


def test_a_test_of_what_is_no_number_is_not_known() -> None:
    assert holds(["[", "--5", "-eq", "5", "]"], Variables({})) is None


@each_row("value", ["9" * 5000, "9" * 18])
def test_a_sum_beyond_what_a_shell_counts_is_not_known(value: str) -> None:
    with pytest.raises(UnknownValueError):
        list(expanded([f"{SUM}A*A{SUM_END}"], Variables({"A": value})))


def test_a_value_that_doubles_itself_is_not_known() -> None:
    text = "A=xxxxxxxx\n" + "A=$A$A\n" * 40 + "vllm serve org/model --served-model-name $A\n"
    assert "A" in kit.refused(text).render()


def test_a_file_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "launch.yaml"
    file.write_text("name: a\nbackend: " + "{a: " * 3000 + "1" + "}" * 3000)
    with pytest.raises(RecipeError, match=r"nested too deeply|not YAML"):
        import_file(file, ImportChoice())


def test_a_setup_script_that_is_no_file_name_is_not_repeated() -> None:
    draft = kit.read(kit.SCHEMA_1 + "setup_script: 'curl -H \"Authorization: Bearer hunter2\" x'\n")
    (why,) = [text for name, text in kit.notes(draft, "served").items() if "setup" in name]
    assert "hunter2" not in why
    assert "setup: [[bash, /configs/FILE]]" in why


def refused(folder: Path, script: str, *, name: str = "launch.sh", **variables: str) -> RecipeError:
    """The error of `pdserve import`, which takes little CPU and names a fix."""
    file = folder / name
    file.write_text(script, encoding="utf-8")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    with pytest.raises(RecipeError) as caught:
        import_file(file, ImportChoice(variables=variables))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before < 15, "it takes too long"
    assert caught.value.todo
    return caught.value


@each_row("end", ["'\n", ""])
def test_a_quote_of_many_lines_is_refused_in_no_time(tmp_path: Path, end: str) -> None:
    error = refused(tmp_path, "echo 'a" + "\nb" * 70_000 + end + "\nvllm serve m\n")
    assert "more than 64 KiB" in error.what
    assert error.where == f"{tmp_path}/launch.sh:1"


def test_a_long_word_is_refused_in_no_time(tmp_path: Path) -> None:
    assert "more than 64 KiB" in refused(tmp_path, "vllm serve m --x " + "a" * 100_000).what


def test_a_quote_of_several_lines_is_one_word() -> None:
    ((echo, word), (after,)) = commands("echo 'a #\n  b\"$X\n' # c\nafter")
    assert (echo.text, word.line, after.text) == ("echo", 1, "after")
    assert word.text.endswith("\n")
    assert word.text.startswith("a #\n  b")


def test_a_mark_of_the_reader_in_a_script_is_refused_with_its_line(tmp_path: Path) -> None:
    error = refused(tmp_path, "A=1\nvllm serve \ue0027\n")
    assert "U+E002" in error.what
    assert error.where == f"{tmp_path}/launch.sh:2"
    assert "U+E002" in refused(tmp_path, "vllm serve $A\n", A="\ue0027").what


def test_a_list_that_doubles_itself_ends_early(tmp_path: Path) -> None:
    error = refused(tmp_path, "A=(a b)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 60 + 'vllm serve "${A[@]}"\n')
    assert "gives no value of A" in error.what


def test_a_word_of_many_long_values_ends_early() -> None:
    variables = Variables({"A": "x" * 60_000})
    with pytest.raises(ScriptLimitError, match="grow beyond"):
        list(expanded(["$A" * 1000], variables))


def test_keywords_without_end_are_read_in_turn(tmp_path: Path) -> None:
    file = tmp_path / "launch.sh"
    file.write_text("then " * 2000 + "vllm serve org/model\n")
    assert import_file(file, ImportChoice()).draft.document["model"]["id"] == "org/model"


@each_row("flag", ["--a" + ".b" * 20_000 + " 1", "--compilation-config '" + '{"a":' * 150 + "1" + "}" * 150 + "'"])
def test_a_flag_that_is_nested_without_measure_is_refused(tmp_path: Path, flag: str) -> None:
    assert "nested too deeply" in refused(tmp_path, f"vllm serve org/model {flag}\n").render()


def test_json_that_no_reader_takes_is_named_as_a_loss(tmp_path: Path) -> None:
    file = tmp_path / "launch.sh"
    file.write_text("vllm serve org/model --kv-transfer-config '" + '{"a":' * 300 + "1" + "}" * 300 + "'\n")
    with pytest.raises(SourceDifferenceError) as caught:
        check_whole(import_file(file, ImportChoice()), file)
    assert "not a JSON object" in caught.value.evidence[0]


def test_half_of_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    assert "half of a surrogate pair" in refused(tmp_path, "vllm serve org/$A\n", A="a\udcff").render()
    assert "U+DCFF" in refused(tmp_path, "vllm serve org/a\n", name="a\udcff.sh").what


def test_more_devices_than_any_cluster_has_are_refused(tmp_path: Path) -> None:
    error = refused(tmp_path, "vllm serve org/model -tp 999999999999999999999999\n")
    assert any("devices are more than a plan is made for" in text for text in error.evidence)
