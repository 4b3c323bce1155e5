"""Command lines as the parser of an installed vLLM reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from pdserve.importing.command_line import LISTED, InstalledParser, ParsedLine
from pdserve.importing.launch import CommandLine, ImportChoice
from pdserve.installed.versions import TESTED
from pdserve.operations import import_recipe
from pdserve.operations.import_recipe import ImportedRecipe, ask_installed, import_file
from tests.messages.kit import run
from tests.tables import each_row

SECRET = "hunter2-hunter2"


def answer(*lines: ParsedLine, names: Sequence[str] = (), switches: Sequence[str] = ()) -> InstalledParser:
    """Of a version that does not exist."""
    return InstalledParser(
        version="7.0",
        names=LISTED.whole | set(names),
        short=LISTED.short,
        switches=frozenset(switches),
        lists=LISTED.lists,
        lines=lines,
    )


def line(**changes: object) -> ParsedLine:
    return ParsedLine.model_validate({"flags": {}, "refused": {}, "repeated": [], "variables": {}, **changes})


class Answers:
    """A vLLM that answers each question with the next of its lines."""

    def __init__(self, *answers: InstalledParser | str) -> None:
        self.answers = list(answers)
        self.asked: list[list[CommandLine]] = []

    def __call__(self, lines: Sequence[CommandLine]) -> InstalledParser | str:
        self.asked.append(list(lines))
        return self.answers[min(len(self.asked), len(self.answers)) - 1]


def script(folder: Path, text: str) -> Path:
    path = folder / "serve.sh"
    path.write_text(f"export VLLM_LOGGING_LEVEL=INFO VLLM_API_KEY={SECRET}\n{text}\n")
    return path


def read(folder: Path, text: str, *answers: InstalledParser | str) -> tuple[ImportedRecipe, Answers]:
    ask = Answers(*answers)
    return import_file(script(folder, text), ImportChoice(), environ={}, ask=ask), ask


def args(recipe: ImportedRecipe) -> dict[str, object]:
    found: dict[str, object] = recipe.draft.document["aggregated"].get("args", {})
    return found


def confirm(recipe: ImportedRecipe) -> list[str]:
    return [f"{note.at}: {note.why}" for note in recipe.draft.notes if "installed here" in note.why]


def test_it_is_asked_about_the_words_and_vllms_variables_of_the_script_once(tmp_path: Path) -> None:
    text = "vllm serve org/m -tp 2 \\\n  --max-num-seqs 4"
    _, ask = read(tmp_path, text, answer(line(flags={"tensor-parallel-size": ["2"], "max-num-seqs": ["4"]})))
    words = ("org/m", "-tp", "2", "--max-num-seqs", "4")
    assert ask.asked == [[CommandLine(words, (("VLLM_LOGGING_LEVEL", "INFO"),))]], "and not about its key"


def test_its_values_hold_and_keep_their_lines(tmp_path: Path) -> None:
    text = "vllm serve org/m \\\n  --max-num-seqs 4 \\\n  --new-flag 5"
    theirs = line(flags={"max-num-seqs": ["8"], "new-flag": ["5"], "made-of-both": ['{"a": [1, 2]}']})
    recipe, _ = read(tmp_path, text, answer(theirs, names=["new-flag"]))
    assert args(recipe) == {"max-num-seqs": 8, "new-flag": 5, "made-of-both": {"a": [1, 2]}}
    assert recipe.draft.origins["aggregated", "args", "max-num-seqs"] == "3: --max-num-seqs"
    assert "# Flags were read by the parser of vLLM 7.0.\n" in recipe.text


STRAY = "a word that belongs to no flag"


@each_row("words, flags, changes, found, losses", [
    ("--only-of-se 5", {"only-of-seven": ["5"]}, {}, {"only-of-seven": 5}, []),
    ("--enforce-eager stray", {"enforce-eager": True}, {}, {"enforce-eager": True}, [STRAY]),
    ("--seed 1 2", {"seed": ["1"]}, {}, {"seed": 1}, [STRAY]),
    ("--middleware a.b --middleware c.d", {"middleware": ["a.b", "c.d"]}, {"repeated": ["middleware"]},
     {"middleware": "c.d"}, ["given several times, which args of a recipe cannot: it has the last one"]),
])  # fmt: skip
def test_names_switches_and_lists_are_those_of_its_version(
    tmp_path: Path, words: str, flags: object, changes: dict[str, object], found: object, losses: list[str]
) -> None:
    theirs = answer(line(flags=flags, **changes), names=["only-of-seven"], switches=["enforce-eager"])
    recipe, ask = read(tmp_path, f"vllm serve org/m {words}", theirs)
    assert args(recipe) == found
    assert [note.why for note in recipe.draft.losses()] == losses
    assert len(ask.asked) == 1, "the words are the same however they are read"


def test_what_it_refuses_is_carried_over_and_named(tmp_path: Path) -> None:
    theirs = line(
        flags={"seed": ["1"]}, refused={"gone": "it has no such flag"}, variables={"VLLM_LOGGING_LEVEL": "it is gone"}
    )
    recipe, _ = read(tmp_path, "vllm serve org/m --seed 1 --gone 2", answer(theirs))
    assert args(recipe) == {"seed": 1, "gone": 2}
    assert confirm(recipe) == [
        "2: --gone: vLLM 7.0, which is installed here: it has no such flag",
        "2: VLLM_LOGGING_LEVEL: vLLM 7.0, which is installed here: it is gone",
    ]


def test_a_line_that_it_does_not_read_to_its_end_is_read_by_the_names(tmp_path: Path) -> None:
    recipe, _ = read(tmp_path, "vllm serve org/m --seed 1", answer(line(refused={"": "its parser stops there"})))
    assert args(recipe) == {"seed": 1}
    assert confirm(recipe) == ["2: vllm serve: vLLM 7.0, which is installed here: its parser stops there"]


@each_row("parser", ["list", "vllm"])
def test_a_word_stays_what_the_engine_would_get(tmp_path: Path, parser: str) -> None:
    text = "vllm serve org/m --allowed-origins '[\"https://a\"]' --served-model-name 1.10 --pass '-p4ss word'"
    flags = {"allowed-origins": ['["https://a"]'], "served-model-name": ["1.10"], "pass": ["-p4ss word"]}
    recipe, _ = read(tmp_path, text, "none" if parser == "list" else answer(line(flags=flags)))
    assert args(recipe) == {"allowed-origins": '["https://a"]', "pass": "-p4ss word"}
    assert recipe.draft.document["model"]["served_name"] == "1.10"


LINES = {
    "beginning": ("org/m", "--max-num-se", "4", "-tp", "2", "-cc.mode=3", "--no-enable-prefix-caching"),
    "dotted": (
        "org/m",
        *("--hf_overrides.some_list+", "a,b", "--hf-overrides.some_list+", "c", "--hf-overrides.size", "2k"),
    ),
    "refused": ("org/m", "--max-num-seqs", SECRET, "--gone-flag", SECRET, "--dtype", SECRET, "--seed", "3"),
    "kv": ("org/m", "--kv-transfer-config", f'{{"kv_connector": "NixlConnector", "kv_rolle": "{SECRET}"}}'),
    "json": ("org/m", "--compilation-config", f"{{{SECRET}"),
    "config": ("org/m", "--config", "/dev/zero", "--seed", "3"),
    "ambiguous": ("org/m", f"--max-num={SECRET}", "--seed", "3"),
    "lacking": ("org/m", "--seed"),
    "repeated": ("org/m", "--middleware", "a.b", "--middleware", "c.d", "--seed", "1", "--seed", "2"),
    "help": ("org/m", "--seed", "1", "-h"),
    "code": ("org/m", "--compilation-config", '{"inductor_passes": {"a": "this.x"}}', "--seed", "3"),
    "negative": ("org/m", "--pin-code", "-12345", "--seed", "3", "--pass", "-p4ss word"),
    "list": ("org/m", "--allowed-origins", '["https://a"]', "--served-model-name", "1.10"),
    "stray": ("org/m", "--enforce-eager", "stray", "--seed", "3", "4"),
}
VARIABLES = {
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NEVER_THERE": SECRET,
    "VLLM_HOST_IP": "a\0b",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG": "/",
    "VLLM_RINGBUFFER_WARNING_INTERVAL": SECRET,
    "OTHER": "1",
}


@pytest.fixture(scope="module")
def installed() -> InstalledParser:
    asked = [
        CommandLine(words, tuple(VARIABLES.items()) if name == "beginning" else ()) for name, words in LINES.items()
    ]
    found = ask_installed(asked)
    assert isinstance(found, InstalledParser), found
    return found


def parsed(parser: InstalledParser, name: str) -> ParsedLine:
    return parser.lines[list(LINES).index(name)]


@pytest.mark.process
@pytest.mark.full
def test_the_list_has_the_names_of_the_tested_version(installed: InstalledParser) -> None:
    assert installed.version.startswith(TESTED["vllm"])
    assert installed.names == LISTED.whole
    assert installed.switches == LISTED.switches
    assert installed.lists == LISTED.lists
    assert dict(installed.short) == dict(LISTED.short)


@pytest.mark.process
@pytest.mark.full
def test_the_installed_parser_resolves_names_and_keys(installed: InstalledParser) -> None:
    assert parsed(installed, "beginning").flags == {
        "max-num-seqs": ["4"],
        "tensor-parallel-size": ["2"],
        "compilation-config": ['{"mode": 3}'],
        "enable-prefix-caching": False,
    }
    assert parsed(installed, "dotted").flags == {"hf-overrides": ['{"some_list": ["a", "b", "c"], "size": 2000}']}
    assert parsed(installed, "repeated").flags == {"middleware": ["a.b", "c.d"], "seed": ["2"]}
    assert parsed(installed, "repeated").repeated == {"middleware"}
    assert parsed(installed, "stray").flags == {"enforce-eager": True, "seed": ["3"]}


@pytest.mark.process
@pytest.mark.full
def test_the_installed_parser_names_what_it_refuses_and_reads_on(installed: InstalledParser) -> None:
    refused = parsed(installed, "refused")
    assert refused.flags["seed"] == ["3"]
    assert refused.refused["gone-flag"] == "it has no such flag"
    assert refused.refused["max-num-seqs"] == "it does not take the value"
    assert refused.refused["dtype"].startswith("it does not take the value; it takes auto, ")
    assert list(parsed(installed, "kv").refused) == ["kv-transfer-config"]
    assert list(parsed(installed, "json").refused) == ["compilation-config"]
    assert parsed(installed, "ambiguous").refused == {"max-num": "its parser stops there"}
    assert set(parsed(installed, "negative").refused) == {"pin-code", "pass"}
    assert parsed(installed, "list").flags == {"allowed-origins": ['["https://a"]'], "served-model-name": ["1.10"]}
    assert parsed(installed, "help") == line(refused={"": "it prints its help, and serves nothing"})
    assert parsed(installed, "lacking").refused == {"seed": "its parser stops there"}
    assert parsed(installed, "beginning").variables == {
        "VLLM_NEVER_THERE": "it does not read this variable",
        "VLLM_RINGBUFFER_WARNING_INTERVAL": "it does not take the value",
    }
    reasons = [why for line in installed.lines for why in (*line.refused.values(), *line.variables.values())]
    assert SECRET not in "".join(reasons)


@pytest.mark.process
@pytest.mark.full
def test_no_file_is_opened_for_a_line(installed: InstalledParser) -> None:
    why = "its parser would read that file, so this line was not given to it"
    assert parsed(installed, "config") == line(refused={"config": why})
    assert parsed(installed, "code").flags["seed"] == ["3"]
    assert "this" not in parsed(installed, "code").refused


@pytest.mark.full
def test_the_verb_asks_the_installed_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Answers(answer(line(flags={"max-num-seqs": ["4"]}, refused={"gone-flag": "it has no such flag"})))
    monkeypatch.setattr(import_recipe, "ask_installed", ask)
    script(tmp_path, "vllm serve org/m --max-num-se 4 --gone-flag 1")
    done = run(("import", "serve.sh"), tmp_path, {})
    assert done.code == 0, done.err
    assert "# Flags were read by the parser of vLLM 7.0.\n" in done.out
    assert "please confirm: 2: --gone-flag: vLLM 7.0, which is installed here: it has no such flag\n" in done.err
    listed = run(("import", "serve.sh", "--flags-from", "list"), tmp_path, {})
    assert "# Flags were read by a list of those of vLLM 0.32: " in listed.out
    assert len(ask.asked) == 1


@pytest.mark.process
def test_a_vllm_that_cannot_be_imported_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken" / "vllm"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libcuda.so.1: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", str(broken.parent))
    script(tmp_path, "vllm serve org/m --max-num-se 4")
    done = import_file(tmp_path / "serve.sh", ImportChoice(), environ={}, ask=ask_installed)
    assert "the installed vLLM gives no parser: ImportError: libcuda.so.1" in done.text
