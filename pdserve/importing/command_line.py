"""Command lines of engines as other tools write them -> the flags of a recipe.

vLLM's parser takes `_` for `-`, short names, any beginning of a name that fits no other (argparse), a whole JSON object
or its keys one by one (`--attention-config.backend X`), and `--no-x`. The names are those of a list, or those of an
installed vLLM, whose parser also refuses what its version does not take. No engine is imported here: an installed one
is asked by operations/vllm_parser_program.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic_core import from_json

from pdserve.importing.launch import CommandLine, Launch, SourcedValue
from pdserve.recipe.flags import flag_words
from pdserve.recipe.load import show, yaml12
from pdserve.recipe.vllm_names import FLAGS, LISTS, SWITCHES


@dataclass(frozen=True)
class FlagNames:
    """Holds the names of flags, without dashes."""

    whole: frozenset[str]
    short: Mapping[str, str]
    """Short name -> the whole one."""
    switches: frozenset[str] = frozenset()
    """Flags that take no value, where that is known."""
    lists: frozenset[str] = frozenset()
    """Flags that take any number of words."""

    def named(self, name: str) -> str:
        """Return the whole name: no dashes in front, `-` for `_`, a short name or a unique beginning written out. A key
        of a JSON object, behind a dot, stays as it is."""
        short = name.startswith("-") and not name.startswith("--")
        first, dot, rest = name.lstrip("-").partition(".")
        first = self.short.get(first, first) if short else first.replace("_", "-")
        bare = first.removeprefix("no-")
        if bare not in self.whole and len(bare) > 3:
            fitting = [known for known in self.whole if known.startswith(bare)]
            if len(fitting) == 1:
                first = first.removesuffix(bare) + fitting[0]
        return f"{first}{dot}{rest}"

    def most_words(self, name: str) -> int | None:
        """Return how many words can follow the flag as it is written. None: any number, or it is not known."""
        known = self.named(name).partition(".")[0]
        if known.removeprefix("no-") in self.switches:
            return 0
        return 1 if known in self.whole and known not in self.lists else None

    def switched_off(self, name: str) -> str | None:
        """Return the flag that `no-x` turns off."""
        bare = name.removeprefix("no-")
        return bare if bare != name and bare in self.whole else None


LISTED = FlagNames(
    FLAGS,
    {
        "asc": "api-server-count",
        "tp": "tensor-parallel-size",
        "pp": "pipeline-parallel-size",
        "dp": "data-parallel-size",
        "ep": "enable-expert-parallel",
        "dpn": "data-parallel-rank",
        "dpr": "data-parallel-start-rank",
        "dpl": "data-parallel-size-local",
        "dpa": "data-parallel-address",
        "dpp": "data-parallel-rpc-port",
        "dpb": "data-parallel-backend",
        "dph": "data-parallel-hybrid-lb",
        "dpe": "data-parallel-external-lb",
        "dpm": "data-parallel-multi-port-external-lb",
        "dcp": "decode-context-parallel-size",
        "pcp": "prefill-context-parallel-size",
        "n": "nnodes",
        "r": "node-rank",
        "q": "quantization",
        "sc": "speculative-config",
        "cc": "compilation-config",
        "ac": "attention-config",
        "dc": "diffusion-config",
        "O": "optimization-level",
    },
    SWITCHES,
    LISTS,
)
"""Those of vLLM 0.32.0 (recipe/vllm_names.py; the short names from its engine/arg_utils.py)."""

_WORD = re.compile(r"--?[A-Za-z][^\s=]*(=|$)")
_TEXTS = (
    "served-model-name",
    "model",
    "revision",
    "tokenizer",
    "tokenizer-revision",
    "code-revision",
    "response-role",
    "download-dir",
    "chat-template",
)
"""Flags whose value is a name, also where it looks like a number: `1.10`."""
_LEVEL = re.compile(r"-O[0-3]")


@dataclass(frozen=True)
class ImportedFlag:
    """A flag as a recipe has it: its name without `no-` and its value. `spelled`: how a dotted one began, None for one
    without a dot."""

    name: str
    value: Any
    spelled: str | None = None


def flag(name: str, value: Any, names: FlagNames = LISTED) -> ImportedFlag:
    """Return one flag of a recipe. `value`: True for a flag without one, text as it was written, or data. A dotted name
    gives a mapping, `--no-x` gives x: false."""
    first, _, keys = names.named(name).partition(".")
    if keys:
        if keys.endswith("+"):
            keys, value = keys[:-1], str(value).split(",")
        value = _json(value)
        for key in reversed(keys.split(".")):
            value = {key: value}
        return ImportedFlag(first, value, name.partition(".")[0])
    if value is True and (off := names.switched_off(first)) is not None:
        return ImportedFlag(off, False)
    return ImportedFlag(first, value if first in _TEXTS else typed_value(value))


def typed_value(value: Any) -> Any:
    """Return a text as what it says: a JSON object, a number, or the text. A JSON list is one word for vLLM, and a list
    of a recipe is several: it stays a text. So does `True`: a flag of vLLM that is a switch takes no value."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("{"):
        return _json(value)
    try:
        scalar = yaml12.scalar(value)
    except ValueError:
        return value
    if isinstance(scalar, bool) or scalar is None:
        return value
    return scalar if isinstance(scalar, float) or str(scalar) == value else value


def merge_flags(flags: Iterable[tuple[ImportedFlag, SourcedValue]]) -> dict[str, SourcedValue]:
    """Return all flags of a command line together. The later of two values holds. Dotted keys of one spelling are
    merged, and hold over a whole JSON object of that flag: vLLM puts what it makes of them at the end of the line."""
    args: dict[str, SourcedValue] = {}
    dotted: dict[str, tuple[str, SourcedValue]] = {}
    for item, at in flags:
        if item.spelled is None:
            args[item.name] = at.of(item.value)
        else:
            before = dotted.get(item.spelled)
            value = item.value if before is None else _merged(before[1].value, item.value)
            dotted[item.spelled] = item.name, at.of(value) if before is None else before[1].of(value)
    return {**args, **dict(dotted.values())}


def from_argv(words: Sequence[str], names: FlagNames = LISTED) -> Iterator[tuple[int, ImportedFlag | str]]:
    """Yield the flags of a command line, each with the number of its word; what belongs to no flag comes as it is."""
    index = 0
    while index < len(words):
        word, start = words[index], index
        index += 1
        if not _WORD.match(word):
            yield start, word
            continue
        if _LEVEL.fullmatch(word):
            yield start, ImportedFlag("optimization-level", int(word[2:]))
            continue
        name, equals, inline = word.partition("=")
        values = [inline] if equals else []
        most = 0 if equals else names.most_words(name)
        while (most is None or len(values) < most) and index < len(words) and not _WORD.match(words[index]):
            values.append(words[index])
            index += 1
        value: Any = True if not values else values[0]
        if len(values) > 1:
            value = values if names.named(name) in _TEXTS else [typed_value(item) for item in values]
        yield start, flag(name, value, names)


def _json(value: Any) -> Any:
    try:
        return from_json(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Merge mappings and put lists together, as vLLM does (utils/argparse_utils.py)."""
    both = dict(old)
    for key, value in new.items():
        before = both.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            both[key] = _merged(before, value)
        elif isinstance(before, list) and isinstance(value, list):
            both[key] = [*before, *value]
        else:
            both[key] = value
    return both


class ParsedLine(BaseModel):
    """One command line as the parser read it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    flags: Mapping[str, bool | Sequence[str]]
    """Whole names without dashes -> their words, or whether a switch is on."""
    refused: Mapping[str, str]
    """Flags -> why this version does not take them. No value is repeated: it may be a secret."""
    repeated: frozenset[str]
    """Flags that take a word each time that they are given, and are given several times."""
    variables: Mapping[str, str]
    """Variables of vLLM -> why this version does not take them."""


class InstalledParser(BaseModel):
    """An installed vLLM answers with its names and with what its parser makes of command lines."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: str
    names: frozenset[str]
    short: Mapping[str, str]
    switches: frozenset[str]
    lists: frozenset[str]
    lines: Sequence[ParsedLine]
    """The lines that were asked about, in that order."""

    def flag_names(self) -> FlagNames:
        """Return the parser's names, to read other lines by."""
        return FlagNames(self.names, self.short, self.switches, self.lists)


@dataclass(frozen=True)
class LineReader:
    """Reads command lines by the names of pdserve's list, or as an installed vLLM reads them."""

    names: FlagNames = LISTED
    version: str | None = None
    """The version of the vLLM whose parser was asked; None: the list."""
    lines: Mapping[CommandLine, ParsedLine] = field(default_factory=dict)

    @classmethod
    def of(cls, parser: InstalledParser, asked: Sequence[CommandLine]) -> LineReader:
        """Return the reader that an installed parser makes. `asked`: the lines to which `parser` has the answers."""
        return cls(parser.flag_names(), parser.version, dict(zip(asked, parser.lines, strict=True)))


BY_LIST = LineReader()
"""Where no vLLM was asked."""


def line_of(args: Mapping[str, SourcedValue], env: Mapping[str, SourcedValue]) -> CommandLine:
    """Return the command line of flags that are data. A model stands first: it would take the next free word
    otherwise."""
    return CommandLine(("MODEL", *flag_words({name: at.value for name, at in args.items()})), variables_of(env))


def variables_of(env: Mapping[str, SourcedValue]) -> tuple[tuple[str, str], ...]:
    """Return the variables of vLLM, without its API key."""
    return tuple(
        (name, str(at.value))
        for name, at in env.items()
        if name.startswith("VLLM_") and isinstance(at.value, str | int | float) and not show.secret_name(name)
    )


def as_parsed(
    args: dict[str, SourcedValue], line: CommandLine, reader: LineReader, launch: Launch, at: SourcedValue
) -> dict[str, SourcedValue]:
    """Correct the flags of a command line by what the installed parser says of it. `args`: the flags as the names give
    them, in their order; `at`: where the role is described. The parser's values hold. What its version does not take
    stays in the recipe, and is a note."""
    parsed = reader.lines.get(line)
    if parsed is None:
        return args
    for name, why in (*parsed.refused.items(), *parsed.variables.items()):
        shown = name if name in parsed.variables else f"--{name}" if name else "vllm serve"
        place = args.get(name, at)
        launch.note(
            SourcedValue(None, shown, place.line), f"vLLM {reader.version}, which is installed here: {why}", "confirm"
        )
    return _corrected(args, parsed, launch, at) if parsed.flags else args


def _corrected(
    args: dict[str, SourcedValue], parsed: ParsedLine, launch: Launch, at: SourcedValue
) -> dict[str, SourcedValue]:
    corrected: dict[str, SourcedValue] = {}
    for name in (*args, *(name for name in parsed.flags if name not in args)):
        ours = args.get(name)
        if name not in parsed.flags:
            # A word that the parser reads as a part of another flag is no flag; one that it refuses is.
            if ours is not None and name in parsed.refused:
                corrected[name] = ours
            continue
        words = parsed.flags[name]
        if ours is None:
            ours = SourcedValue(None, f"--{name}", at.line)
        if name in parsed.repeated:
            launch.note(ours, "given several times, which args of a recipe cannot: it has the last one", "served")
            words = words if isinstance(words, bool) else words[-1:]
        corrected[name] = ours.of(_value(name, words))
    return corrected


def _value(name: str, words: bool | Sequence[str]) -> object:
    if isinstance(words, bool):
        return words
    return flag(f"--{name}", words[0]).value if len(words) == 1 else [typed_value(word) for word in words]
