"""Command lines of engines as other tools write them -> the flags of a recipe.

vLLM's parser takes `_` for `-`, short names, any beginning of a name that fits no other (argparse), a whole JSON object
or its keys one by one (`--attention-config.backend X`), and `--no-x`. The names are those of a list: no vLLM is needed
to read a launch, and the one that is installed here may not be the one that the launch is for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from pdserve.importing.launch import SourcedValue
from pdserve.recipe.load import yaml12
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


def flag(name: str, value: Any) -> ImportedFlag:
    """Return one flag of a recipe. `value`: True for a flag without one, text as it was written, or data. A dotted name
    gives a mapping, `--no-x` gives x: false."""
    first, _, keys = LISTED.named(name).partition(".")
    if keys:
        if keys.endswith("+"):
            keys, value = keys[:-1], str(value).split(",")
        value = _json(value)
        for key in reversed(keys.split(".")):
            value = {key: value}
        return ImportedFlag(first, value, name.partition(".")[0])
    if value is True and (off := LISTED.switched_off(first)) is not None:
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


def from_argv(words: Sequence[str]) -> Iterator[tuple[int, ImportedFlag | str]]:
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
        most = 0 if equals else LISTED.most_words(name)
        while (most is None or len(values) < most) and index < len(words) and not _WORD.match(words[index]):
            values.append(words[index])
            index += 1
        value: Any = True if not values else values[0]
        if len(values) > 1:
            value = values if LISTED.named(name) in _TEXTS else [typed_value(item) for item in values]
        yield start, flag(name, value)


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
