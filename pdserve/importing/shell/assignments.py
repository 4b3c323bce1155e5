"""The assignments of a shell script's commands, and which other commands change variables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.importing.shell.commands import Word

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_ELEMENT = re.compile(r"([A-Za-z_]\w*)\[[^]]*\]\+?=")
_COUNTED = re.compile(r"([A-Za-z_]\w*)(?:\+\+|--|(?:<<|>>|[-+*/%&|^])?=(?!=))|(?:\+\+|--)([A-Za-z_]\w*)")
"""In `((...))` and behind `let`."""


@dataclass(frozen=True)
class Assignment:
    """NAME=text, or with `items` NAME=(...); `adds`: with +=."""

    name: str
    adds: bool
    text: str
    items: tuple[str, ...] | None
    line: int


def assignment(words: Sequence[Word], index: int) -> tuple[Assignment, int] | None:
    """The assignment at `index`, and the index behind it."""
    word = words[index]
    match = ASSIGNMENT.fullmatch(word.text)
    if match is None:
        return None
    name, adds, text = match.groups()
    index += 1
    items: tuple[str, ...] | None = None
    if not text and index < len(words) and words[index].text == "(":
        items, index = _until_closed(words, index)
    return Assignment(name, bool(adds), text, items, word.line), index


def assignments(words: Sequence[Word]) -> tuple[list[Assignment], int]:
    """Those that a command begins with, and the index of its first other word."""
    found: list[Assignment] = []
    index = 0
    while index < len(words) and (one := assignment(words, index)) is not None:
        found.append(one[0])
        index = one[1]
    return found, index


def changed(texts: Sequence[str]) -> frozenset[str]:
    """Variables that a command sets to what is known only when it runs."""
    match list(texts):
        case ["read" | "mapfile" | "readarray", *words]:
            return frozenset(word for word in words if word.isidentifier())
        case ["getopts", _, name, *_] | ["printf", "-v", name, *_]:
            return frozenset({name})
        case ["((" | "let", *words]:
            return frozenset(name for pair in _COUNTED.findall("".join(words)) for name in pair if name)
        case [first, *_] if (match := _ELEMENT.match(first)) is not None:
            return frozenset({match[1]})
    return frozenset()


def _until_closed(words: Sequence[Word], index: int) -> tuple[tuple[str, ...], int]:
    """The words in the brackets that open at `index`, and the index behind them."""
    depth, items = 0, []
    while index < len(words):
        word = words[index]
        index += 1
        if word.is_operator:
            depth += word.text.count("(") - word.text.count(")")
            if depth <= 0:
                break
        else:
            items.append(word.text)
    return tuple(items), index
