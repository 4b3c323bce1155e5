"""vLLM's flags as other tools write them -> the flags of a recipe.

vLLM's parser takes `_` for `-`, short names, any beginning of a name that fits no other (argparse), a whole JSON object
or its keys one by one (`--attention-config.backend X`), and `--no-x`. The names are those of vllm_flags.py; no engine
is imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from pdserve.importing.launch import Sourced
from pdserve.recipe.flags import known_flags
from pdserve.recipe.load import yaml12

SHORT = {
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
}
"""Short names of vLLM 0.32.0 (engine/arg_utils.py)."""
_WORD = re.compile(r"--?[A-Za-z]")
_LEVEL = re.compile(r"-O[0-3]")


@dataclass(frozen=True)
class ImportedFlag:
    """A flag as a recipe has it: its name without `no-` and its value. `spelled`: how a dotted one began, None for one
    without a dot."""

    name: str
    value: Any
    spelled: str | None = None


def named(name: str) -> str:
    """The whole name: no dashes in front, `-` for `_`, a short name or a unique beginning written out. What comes after
    a dot is a key of a JSON object and stays as it is."""
    short = name.startswith("-") and not name.startswith("--")
    first, dot, rest = name.lstrip("-").partition(".")
    first = SHORT.get(first, first) if short else first.replace("_", "-")
    bare = first.removeprefix("no-")
    if bare not in known_flags() and len(bare) > 3:
        fitting = [known for known in known_flags() if known.startswith(bare)]
        if len(fitting) == 1:
            first = first.removesuffix(bare) + fitting[0]
    return f"{first}{dot}{rest}"


def flag(name: str, value: Any) -> ImportedFlag:
    """One flag of a recipe. `value`: True for a flag without one, text as it was written, or data. A dotted name gives
    a mapping, `--no-x` gives x: false."""
    first, _, keys = named(name).partition(".")
    if keys:
        if keys.endswith("+"):
            keys, value = keys[:-1], str(value).split(",")
        value = _json(value)
        for key in reversed(keys.split(".")):
            value = {key: value}
        return ImportedFlag(first, value, name.partition(".")[0])
    if value is True and first.startswith("no-") and first[3:] in known_flags():
        return ImportedFlag(first[3:], False)
    return ImportedFlag(first, typed(value))


def typed(value: Any) -> Any:
    """A text as what it says: a JSON object or list, a number, or the text. `True` stays a text: a flag of vLLM that is
    a switch takes no value."""
    if not isinstance(value, str):
        return value
    if value.lstrip()[:1] in ("{", "["):
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


def from_argv(words: Sequence[str]) -> Iterator[tuple[int, ImportedFlag | str]]:
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
        while not equals and index < len(words) and not _WORD.match(words[index]):
            values.append(words[index])
            index += 1
        value: Any = True if not values else values[0] if len(values) == 1 else [typed(item) for item in values]
        yield start, flag(name, value)


def _json(value: Any) -> Any:
    try:
        return from_json(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    both = dict(old)
    for key, value in new.items():
        before = both.get(key)
        both[key] = _merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return both
