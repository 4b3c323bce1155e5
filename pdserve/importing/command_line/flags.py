"""vLLM's flags as other tools write them -> the flags of a recipe.

vLLM's parser takes `_` for `-`, short names, any beginning of a name that fits no other (argparse), a whole JSON object
or its keys one by one (`--attention-config.backend X`), and `--no-x`. The names are those of a list, or of an installed
vLLM (flag_names.py); no engine is imported here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from pdserve.importing.command_line.flag_names import LISTED, FlagNames
from pdserve.importing.launch import Sourced
from pdserve.recipe.load import yaml12

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
    """One flag of a recipe. `value`: True for a flag without one, text as it was written, or data. A dotted name gives
    a mapping, `--no-x` gives x: false."""
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
    return ImportedFlag(first, value if first in _TEXTS else typed(value))


def typed(value: Any) -> Any:
    """A text as what it says: a JSON object, a number, or the text. A JSON list is one word for vLLM, and a list of a
    recipe is several: it stays a text. So does `True`: a flag of vLLM that is a switch takes no value."""
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


def collected(flags: Iterable[tuple[ImportedFlag, Sourced]]) -> dict[str, Sourced]:
    """All flags of a command line together. The later of two values holds. Dotted keys of one spelling are merged, and
    hold over a whole JSON object of that flag: vLLM puts what it makes of them at the end of the line."""
    args: dict[str, Sourced] = {}
    dotted: dict[str, tuple[str, Sourced]] = {}
    for item, at in flags:
        if item.spelled is None:
            args[item.name] = at.of(item.value)
        else:
            before = dotted.get(item.spelled)
            value = item.value if before is None else _merged(before[1].value, item.value)
            dotted[item.spelled] = item.name, at.of(value) if before is None else before[1].of(value)
    return {**args, **dict(dotted.values())}


def from_argv(words: Sequence[str], names: FlagNames = LISTED) -> Iterator[tuple[int, ImportedFlag | str]]:
    """The flags of a command line, each with the number of its word; what belongs to no flag comes as it is."""
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
            value = values if names.named(name) in _TEXTS else [typed(item) for item in values]
        yield start, flag(name, value, names)


def _json(value: Any) -> Any:
    try:
        return from_json(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """As vLLM does (utils/argparse_utils.py): mappings are merged, lists are put together."""
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
