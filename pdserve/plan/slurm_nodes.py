"""Nodes in Slurm's words: nodelists (`rack[0-1]node[00-03],login1`), and the sbatch options that ask for nodes.

What cannot be read is an error with its place, never a guess: a name that is lost or made up here becomes a node
without an agent, or an agent on another user's node.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import NoReturn

from pdserve.errors import PreflightError

MOST_NAMES = 65536
_MOST_DIGITS = 18
_PLAIN = re.compile(r"[A-Za-z0-9_.-]+", re.ASCII)
_NUMBERS = re.compile(r"([0-9]+)(?:-([0-9]+))?", re.ASCII)
_NUMBERED = re.compile(r"(.*?)([0-9]+)", re.ASCII)


def expand_nodelist(nodelist: str, *, where: str = "nodelist") -> tuple[str, ...]:
    """Return the names in the order of the list. `where` is named in errors: the variable or option it came from.

    Padding is kept (`n[007-010]`), several brackets in a name give every combination, the last one fastest. Raises
    PreflightError for everything else, also for a name that is there twice.
    """
    return _Reader(nodelist, where).names()


def fold_nodelist(names: Sequence[str]) -> str:
    """Return a nodelist that `expand_nodelist` reads back as exactly `names`, as sbatch takes it for --nodelist and
    --exclude: one bracket at most, at the end of a name. Raises PreflightError for a name that is none, or is there
    twice."""
    parts: list[str] = []
    for prefix, group in itertools.groupby(names, key=_text_before_number):
        members = list(group)
        ranges = list(_ranges([name[len(prefix) :] for name in members])) if prefix is not None else []
        bracketed = prefix is not None and len(members) > 1
        parts += [f"{prefix}[{','.join(ranges)}]"] if bracketed else members
    text = ",".join(parts)
    if names:
        expand_nodelist(text, where="node names")
    return text


class _Reader:
    """One pass over the text; `position` is where the next character is read."""

    def __init__(self, text: str, where: str) -> None:
        self._text = text
        self._where = where
        self._position = 0

    def names(self) -> tuple[str, ...]:
        names: dict[str, None] = {}
        while True:
            start = self._position
            pieces = self._item()
            count = 1
            for piece in pieces:
                count *= len(piece)
                if len(names) + count > MOST_NAMES:
                    self._fail(f"more than {MOST_NAMES} names", start)
            for combination in itertools.product(*pieces):
                name = "".join(combination)
                if name in names:
                    self._fail(f"{name} is there twice", start)
                if name.startswith("-"):
                    self._fail(f'"{name}" is not the name of a node', start)
                names[name] = None
            if self._position == len(self._text):
                return tuple(names)
            self._position += 1  # the comma at which an item ends

    def _item(self) -> list[list[str]]:
        """Return the pieces of one name up to a comma or the end; a bracket is a piece with several values."""
        pieces: list[list[str]] = []
        while self._position < len(self._text) and (char := self._text[self._position]) != ",":
            if char == "[":
                pieces.append(self._bracket())
            elif plain := _PLAIN.match(self._text, self._position):
                pieces.append([plain.group()])
                self._position = plain.end()
            else:
                self._fail_at_char(char)
        if not pieces:
            self._fail("a name is missing", self._position)
        return pieces

    def _bracket(self) -> list[str]:
        opened = self._position
        values: list[str] = []
        while True:
            self._position += 1  # the bracket or the comma
            values += self._range(len(values), opened)
            end = self._text[self._position : self._position + 1]
            if end == "]":
                self._position += 1
                return values
            if not end:
                self._fail("a [ that is never closed", opened)
            if end != ",":
                self._fail_at_char(end)

    def _range(self, before: int, opened: int) -> list[str]:
        match = _NUMBERS.match(self._text, self._position)
        if match is None:
            if self._position >= len(self._text):
                self._fail("a [ that is never closed", opened)
            self._fail(
                "a number is missing" if self._text[self._position] in ",]-" else self._char_error(), self._position
            )
        first, last = match.group(1), match.group(2) or match.group(1)
        if max(len(first), len(last)) > _MOST_DIGITS:
            self._fail(f"a number of more than {_MOST_DIGITS} digits", self._position)
        low, high = int(first), int(last)
        if low > high:
            self._fail(f"a range that runs backwards: {match.group()}", self._position)
        if before + high - low >= MOST_NAMES:
            self._fail(f"more than {MOST_NAMES} names", self._position)
        width = len(first)  # a first number without padding is no wider than those that follow
        if last != str(high).zfill(width):
            self._fail(f"a range whose ends are padded differently: {match.group()}", self._position)
        self._position = match.end()
        return [str(number).zfill(width) for number in range(low, high + 1)]

    def _fail_at_char(self, char: str) -> NoReturn:
        self._fail("a ] without its [" if char == "]" else self._char_error(), self._position)

    def _char_error(self) -> str:
        char = self._text[self._position]
        if char == "[":
            return "a [ inside a bracket"
        return "white space" if char.isspace() else f"{char!r}, which no nodelist has"

    def _fail(self, what: str, position: int) -> NoReturn:
        """Shows the place; a long list only around it."""
        start = max(position - 40, 0)
        shown = self._text[start : position + 40]
        raise PreflightError(
            f"not a list of nodes, at character {position + 1}: {what}",
            where=self._where,
            todo="write it as Slurm does: node1,node[3-5],rack[0-1]n[00-07]",
            evidence=(shown, " " * (position - start) + "^") if _has_even_columns(shown) else (ascii(shown),),
        )


def _has_even_columns(text: str) -> bool:
    """Return whether every character takes one column, so that a mark below it points at the right one."""
    return text.isascii() and text.isprintable()


def _text_before_number(name: str) -> str | None:
    """Return what stands before the number at the end of a name; None when there is none, or one that is too long."""
    match = _NUMBERED.fullmatch(name)
    return match.group(1) if match is not None and len(match.group(2)) <= _MOST_DIGITS else None


def _ranges(numbers: Sequence[str]) -> Iterator[str]:
    """Yield runs of consecutive numbers, as `expand_nodelist` counts them."""
    first = last = numbers[0]
    for number in numbers[1:]:
        if number == str(int(last) + 1).zfill(len(first)):
            last = number
            continue
        yield first if first == last else f"{first}-{last}"
        first = last = number
    yield first if first == last else f"{first}-{last}"


SCRIPT = "slurm/disagg.sh"


def submit_line(*, nodes: int, gpus_per_node: int, exclude: Sequence[str], words: Sequence[str]) -> str:
    """Return the sbatch line to type. `words`: the recipe and overrides, as given to `pdserve up`."""
    # The script itself asks for GPUs; `none` takes that back (tried on Slurm 22.05).
    no_gpus = [] if gpus_per_node else ["--gres=none"]
    return shlex.join(["sbatch", *shape_options(nodes, gpus_per_node, exclude), *no_gpus, SCRIPT, *words])


def shape_options(nodes: int, gpus_per_node: int, exclude: Sequence[str]) -> list[str]:
    """Return sbatch's options for so many nodes with so many GPUs (0: a job without GPUs)."""
    return [
        f"--nodes={nodes}",
        *([f"--gres=gpu:{gpus_per_node}"] if gpus_per_node else []),
        *([f"--exclude={fold_nodelist(exclude)}"] if exclude else []),
    ]
