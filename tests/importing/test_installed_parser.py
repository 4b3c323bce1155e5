"""Command lines as the parser of an installed vLLM reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pdserve.importing.command_line import LISTED, InstalledParser, ParsedLine
from pdserve.importing.launch import CommandLine, ImportChoice
from pdserve.installed.versions import TESTED
from pdserve.operations import import_recipe
from pdserve.operations.import_recipe import ImportedRecipe, ask_installed, import_file
from tests.messages.kit import run
from tests.tables import each_row

SECRET = "hunter2-hunter2"


def answer(*names: str, **of_the_line: object) -> InstalledParser:
    """Of a version that does not exist, about one command line."""
    line = {"flags": {}, "refused": {}, "repeated": [], "variables": {}, **of_the_line}
    return InstalledParser(
        version="7.0",
        names=LISTED.whole | set(names),
        short=LISTED.short,
        switches=LISTED.switches,
        lists=LISTED.lists,
        lines=(ParsedLine.model_validate(line),),
    )


def script(folder: Path, text: str) -> Path:
    path = folder / "serve.sh"
    path.write_text(f"export VLLM_LOGGING_LEVEL=INFO VLLM_API_KEY={SECRET}\n{text}\n")
    return path


def read(folder: Path, text: str, answered: InstalledParser | str) -> ImportedRecipe:
    return import_file(script(folder, text), ImportChoice(), environ={}, ask=lambda _: answered)


def args(recipe: ImportedRecipe) -> dict[str, object]:
    found: dict[str, object] = recipe.draft.document["aggregated"].get("args", {})
    return found


def confirm(recipe: ImportedRecipe) -> list[str]:
    return [f"{note.at}: {note.why}" for note in recipe.draft.notes if "installed here" in note.why]


def test_it_is_asked_about_the_words_and_vllms_variables_of_the_script_once(tmp_path: Path) -> None:
    asked: list[Sequence[CommandLine]] = []

    def ask(lines: Sequence[CommandLine]) -> InstalledParser:
        asked.append(lines)
        return answer(flags={"tensor-parallel-size": ["2"], "max-num-seqs": ["4"]})

    text = "vllm serve org/m -tp 2 \\\n  --max-num-seqs 4"
    import_file(script(tmp_path, text), ImportChoice(), environ={}, ask=ask)
    words = ("org/m", "-tp", "2", "--max-num-seqs", "4")
    assert asked == [[CommandLine(words, (("VLLM_LOGGING_LEVEL", "INFO"),))]], "and not about its key"


def test_its_values_hold_and_keep_their_lines(tmp_path: Path) -> None:
    text = "vllm serve org/m \\\n  --max-num-seqs 4 \\\n  --new-flag 5"
    flags = {"max-num-seqs": ["8"], "new-flag": ["5"], "made-of-both": ['{"a": [1, 2]}']}
    recipe = read(tmp_path, text, answer("new-flag", flags=flags))
    assert args(recipe) == {"max-num-seqs": 8, "new-flag": 5, "made-of-both": {"a": [1, 2]}}
    assert recipe.draft.origins["aggregated", "args", "max-num-seqs"] == "3: --max-num-seqs"
    assert "# Flags were read by the parser of vLLM 7.0.\n" in recipe.text


@each_row("words, answered, found, loss", [
    ("--only-of-se 5", {"flags": {"only-of-seven": ["5"]}}, {"only-of-seven": 5}, None),
    ("--seed 1 2", {"flags": {"seed": ["1"]}}, {"seed": 1}, "a word that belongs to no flag"),
    ("--middleware a.b --middleware c.d", {"flags": {"middleware": ["a.b", "c.d"]}, "repeated": ["middleware"]},
     {"middleware": "c.d"}, "given several times, which args of a recipe cannot: it has the last one"),
])  # fmt: skip
def test_names_and_lists_are_those_of_its_version(
    tmp_path: Path, words: str, answered: dict[str, Any], found: object, loss: str | None
) -> None:
    recipe = read(tmp_path, f"vllm serve org/m {words}", answer("only-of-seven", **answered))
    assert args(recipe) == found
    assert [note.why for note in recipe.draft.losses()] == ([loss] if loss else [])


@each_row("answered, found, said", [
    ({"flags": {"seed": ["1"]}, "refused": {"gone": "it is gone"}}, {"seed": 1, "gone": 2}, "2: --gone: %s it is gone"),
    ({"flags": {"seed": ["1"]}, "variables": {"VLLM_LOGGING_LEVEL": "gone"}}, {"seed": 1},
     "2: VLLM_LOGGING_LEVEL: %s gone"),
    # It did not read to the end, so the names that it has read the line.
    ({"refused": {"": "it stops there"}}, {"seed": 1, "gone": 2}, "2: vllm serve: %s it stops there"),
])  # fmt: skip
def test_what_it_refuses_is_named(tmp_path: Path, answered: dict[str, Any], found: object, said: str) -> None:
    recipe = read(tmp_path, "vllm serve org/m --seed 1 --gone 2", answer(**answered))
    assert args(recipe) == found
    assert said % "vLLM 7.0, which is installed here:" in [f"{note.at}: {note.why}" for note in recipe.draft.notes]


@each_row("parser", ["list", "vllm"])
def test_a_word_stays_what_the_engine_would_get(tmp_path: Path, parser: str) -> None:
    text = "vllm serve org/m --allowed-origins '[\"https://a\"]' --served-model-name 1.10 --pass '-p4ss word'"
    flags = {"allowed-origins": ['["https://a"]'], "served-model-name": ["1.10"], "pass": ["-p4ss word"]}
    recipe = read(tmp_path, text, "none" if parser == "list" else answer(flags=flags))
    assert args(recipe) == {"allowed-origins": '["https://a"]', "pass": "-p4ss word"}
    assert recipe.draft.document["model"]["served_name"] == "1.10"


Found = dict[str, object]
NO_FILE = "its parser would read that file, so this line was not given to it"
NO_VALUE, STOPS = "it does not take the value", "its parser stops there"
LINES: list[tuple[str, Found, dict[str, str]]] = [
    # what is written, its flags, what is refused
    ("--max-num-se 4 -tp 2 -cc.mode=3 --no-enable-prefix-caching",
     {"max-num-seqs": ["4"], "tensor-parallel-size": ["2"], "compilation-config": ['{"mode": 3}'],
      "enable-prefix-caching": False}, {}),
    ("--hf_overrides.some_list+ a,b --hf-overrides.some_list+ c --hf-overrides.size 2k",
     {"hf-overrides": ['{"some_list": ["a", "b", "c"], "size": 2000}']}, {}),
    ("--middleware a.b --middleware c.d --seed 1 --seed 2", {"middleware": ["a.b", "c.d"], "seed": ["2"]}, {}),
    ("--enforce-eager stray --seed 3 4", {"enforce-eager": True, "seed": ["3"]}, {}),
    ('--allowed-origins ["https://a"] --served-model-name 1.10',
     {"allowed-origins": ['["https://a"]'], "served-model-name": ["1.10"]}, {}),
    (f"--max-num-seqs {SECRET} --gone-flag {SECRET} --seed 3", {"max-num-seqs": [SECRET], "seed": ["3"]},
     {"gone-flag": "it has no such flag", "max-num-seqs": NO_VALUE}),
    (f"--max-num={SECRET} --seed 3", {}, {"max-num": STOPS}),
    ("--seed", {}, {"seed": STOPS}),
    ("--seed 1 -h", {}, {"": "it prints its help, and serves nothing"}),
    ("--config /dev/zero --seed 3", {}, {"config": NO_FILE}),
    ('--compilation-config {"inductor_passes":{"a":"this.x"}} --seed 3',
     {"compilation-config": ['{"inductor_passes":{"a":"this.x"}}'], "seed": ["3"]}, {}),
]  # fmt: skip
VARIABLES = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_NEVER_THERE": SECRET, "VLLM_RINGBUFFER_WARNING_INTERVAL": SECRET}
REFUSED_VARIABLES = {
    "VLLM_NEVER_THERE": "it does not read this variable",
    "VLLM_RINGBUFFER_WARNING_INTERVAL": "it does not take the value",
}


@pytest.mark.process
@pytest.mark.full
def test_the_installed_parser_resolves_names_and_keys_and_names_what_it_refuses() -> None:
    variables = tuple(VARIABLES.items())
    installed = ask_installed([CommandLine(("org/m", *words.split()), variables) for words, _, _ in LINES])
    assert isinstance(installed, InstalledParser), installed
    assert installed.version.startswith(TESTED["vllm"])
    assert (installed.names, installed.switches, installed.lists) == (LISTED.whole, LISTED.switches, LISTED.lists)
    assert dict(installed.short) == dict(LISTED.short)
    assert [(line.flags, line.refused) for line in installed.lines] == [(flags, why) for _, flags, why in LINES]
    assert installed.lines[0].variables == REFUSED_VARIABLES


@pytest.mark.full
def test_the_verb_asks_the_installed_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = answer(flags={"max-num-seqs": ["4"]}, refused={"gone-flag": "it has no such flag"})
    monkeypatch.setattr(import_recipe, "ask_installed", lambda _: theirs)
    script(tmp_path, "vllm serve org/m --max-num-se 4 --gone-flag 1")
    done = run(("import", "serve.sh"), tmp_path, {})
    assert done.code == 0, done.err
    assert "# Flags were read by the parser of vLLM 7.0.\n" in done.out
    assert "please confirm: 2: --gone-flag: vLLM 7.0, which is installed here: it has no such flag\n" in done.err
    listed = run(("import", "serve.sh", "--flags-from", "list"), tmp_path, {})
    assert "# Flags were read by a list of those of vLLM 0.32: " in listed.out


@pytest.mark.process
def test_a_vllm_that_cannot_be_imported_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken" / "vllm"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libcuda.so.1: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", str(broken.parent))
    script(tmp_path, "vllm serve org/m --max-num-se 4")
    done = import_file(tmp_path / "serve.sh", ImportChoice(), environ={}, ask=ask_installed)
    assert "the installed vLLM gives no parser: ImportError: libcuda.so.1" in done.text
