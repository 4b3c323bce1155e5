"""What PyYAML objects to, as a person at the file would put it: the line, the cause, and the line to write."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import NamedTuple

import yaml

from pdserve.errors import RecipeError
from pdserve.recipe.load import invisible, show

_PAIR = re.compile(r"(\s*(?:- +)*)([^\s:#'\"\[\]{},&*!|>%@`][^:]*?):\s+(\S.*?)\s*")
_NO_SPACE = re.compile(r"\s*(?:- +)?([A-Za-z_][\w.-]*):(\S+)\s*")
_STAR = re.compile(r"(?<=[\s\[{,])\*[^\s\]},]*")
_LATER = re.compile(r"^([^\s].*?)\s+#.*$")


class _Finding(NamedTuple):
    """What is wrong, its cause, and what to do."""

    what: str
    cause: str | None = None
    todo: str | None = None
    line: int | None = None
    """Where it is, from 0, if not where PyYAML noticed it."""


@dataclass(frozen=True)
class _Spot:
    """Where PyYAML stopped, in which text."""

    problem: str
    context: str
    line: int
    column: int
    opened: int | None
    """The line where what it was reading began."""
    lines: list[str]

    @property
    def text(self) -> str:
        return self.at(self.line)

    def at(self, line: int) -> str:
        return self.lines[line] if line < len(self.lines) else ""


def explain(error: yaml.YAMLError, text: str, name: str) -> RecipeError:
    """The error for the file, or option of the command line, that `name` is."""
    if isinstance(error, yaml.reader.ReaderError):
        return _unreadable(text, name)
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    if mark is None:
        return RecipeError(f"not YAML: {problem}", where=name)
    opened = getattr(error, "context_mark", None)
    spot = _Spot(
        problem,
        getattr(error, "context", None) or "",
        mark.line,
        mark.column,
        None if opened is None else opened.line,
        re.split("\r\n|[\n\r\x85\u2028\u2029]", text),
    )
    finding = _finding(spot)
    line = spot.line if finding.line is None else finding.line
    shown = spot.at(line)
    secret = show.looks_secret(shown)
    return RecipeError(
        finding.what,
        where=_place(name, line),
        cause=finding.cause,
        todo="put the value in quotes" if secret and finding.todo and "`" in finding.todo else finding.todo,
        evidence=(invisible.escaped(shown.rstrip())[:160],) if shown.strip() and not secret else (),
    )


def _place(name: str, line: int) -> str:
    return name if name.startswith("--") else f"{name}:{line + 1}"


def _unreadable(text: str, name: str) -> RecipeError:
    """A control character, which no YAML file may have."""
    position = next((i for i, char in enumerate(text) if yaml.reader.Reader.NON_PRINTABLE.match(char)), 0)
    before = text[:position].splitlines() or [""]
    line, column = text.count("\n", 0, position), len(before[-1]) + 1 if position and text[position - 1] != "\n" else 1
    return RecipeError(
        f"not YAML: {invisible.name(text[position])} at column {column}",
        where=_place(name, line),
        cause="a control character: the file is no text, or was damaged on its way",
        todo="delete the character, or write the line anew",
    )


def _finding(spot: _Spot) -> _Finding:
    return _characters(spot) or _blocks(spot) or _brackets(spot) or _values(spot) or _other(spot)


def _characters(spot: _Spot) -> _Finding | None:
    """Characters that no person sees."""
    text = spot.text
    if "\t" in text[: len(text) - len(text.lstrip())]:
        return _Finding(
            "a tab in the indentation", "YAML is indented with spaces only",
            "replace the tab by spaces (two a level)",
        )  # fmt: skip
    for line in (spot.line, *(() if spot.opened is None else (spot.opened,)), max(spot.line - 1, 0)):
        if (hidden := invisible.first(spot.at(line))) is not None:
            column, name = hidden
            return _Finding(
                f"not YAML: {name} at column {column + 1}",
                "it looks like a space or like nothing, and YAML takes it for a letter",
                "delete the character and type a plain space",
                line,
            )
    if "'\\t' that cannot start" in spot.problem:
        why = "only spaces separate a key and its value"
        return _Finding("a tab before the value", why, "replace the tab by a space")
    return None


def _blocks(spot: _Spot) -> _Finding | None:
    """Lines that do not fit each other."""
    problem, pair = spot.problem, _PAIR.fullmatch(spot.text)
    written = None if pair is None else f"write `{pair.group(2)}: {_quoted(pair.group(3).replace(chr(34), ''))}`"
    if "another document" in problem or "single document" in problem or "single document" in spot.context:
        return _Finding(
            "a second YAML document begins here", "a file is one document",
            "put the other one in a file of its own and remove the --- between them",
        )  # fmt: skip
    if "could not find expected ':'" in problem and "simple key" in spot.context:
        return _no_colon(spot)
    if "mapping values are not allowed" in problem:
        return _second_colon(spot)
    if "expected '<document start>'" in problem and not spot.text.startswith("%"):
        return _Finding(
            "not YAML: this line does not line up with the lines above",
            "the first keys of the file are indented, or a line above is no `key: value`",
            "begin every top-level key in the first column",
        )
    if "<block end>" in problem and "mapping start" in problem:
        return _Finding(
            "not YAML: this line begins in a column of its own",
            "it lines up with no key above",
            "give all keys of one level the same number of spaces in front",
        )
    if "<block end>" in problem and ("'-'" in problem or "sequence start" in problem):
        return _Finding(
            "not YAML: a list item (-) where a key is expected",
            f"the keys of this level begin at line {(spot.opened or 0) + 1}",
            "indent the items below their key, or write the list in brackets: `key: [a, b]`",
        )
    if "<block end>" in problem and "scalar" in problem:
        return _Finding(
            "not YAML: text after the closing quote",
            "a quoted value ends at its second quote",
            written or "put the whole value in one pair of quotes",
        )
    if "sequence entries are not allowed" in problem and pair is not None:
        items = [item for item in re.split(r"\s*-\s+", pair.group(3)) if item]
        return _Finding(
            "not YAML: a list item (-) on the line of its key",
            "items with - begin on lines of their own",
            f"write `{pair.group(2)}: [{', '.join(items)}]`",
        )
    return None


def _no_colon(spot: _Spot) -> _Finding:
    line = spot.line if spot.opened is None else spot.opened
    if _NO_SPACE.fullmatch(spot.at(line)) is not None:
        return _no_space(spot, line)
    return _Finding("not YAML: no colon in this line", "every line is `key: value`, or `- item`", "add the colon", line)


def _no_space(spot: _Spot, line: int) -> _Finding:
    key, _, value = spot.at(line).strip().partition(":")
    what, why = "not YAML: no space after the colon", "a key ends with a colon and a space"
    return _Finding(what, why, f"write `{key}: {value}`", line)


def _second_colon(spot: _Spot) -> _Finding:
    pair = _PAIR.fullmatch(spot.text)
    above = next((n for n in range(spot.line - 1, -1, -1) if spot.at(n).strip()), None)
    if above is not None and _NO_SPACE.fullmatch(spot.at(above)) is not None:
        return _no_space(spot, above)
    if pair is not None and pair.group(3)[0] not in "{['\"" and re.search(r":(\s|$)", pair.group(3)):
        return _Finding(
            "not YAML: a second `: ` in one line", "a value with a colon and a space in it needs quotes",
            f"write `{pair.group(2)}: {_quoted(pair.group(3))}`",
        )  # fmt: skip
    if above is None:
        return _Finding(f"not YAML: {spot.problem}", None, "put a value with a colon in it in quotes")
    return _Finding(
        "not YAML: this line is indented, and the line above has a value already",
        f"line {above + 1} is `{_shown(spot.at(above))}`: nothing can stand below it",
        f"begin it in the same column as line {above + 1}, or leave the value there out",
    )


def _brackets(spot: _Spot) -> _Finding | None:
    """Brackets and quotes that are not closed."""
    if "flow" in spot.context and "${" in spot.text:
        name = re.search(r"\$\{(\w+)", spot.text)
        quoted = f'"${{{name.group(1) if name else "NAME"}}}"'
        return _Finding(_detail(spot), None, f"inside {{ }} and [ ] a reference needs quotes: {quoted}")
    if "flow" in spot.context and spot.opened is not None and "expected ',' or" in spot.problem:
        closing = "]" if "']'" in spot.problem else "}"
        return _Finding(
            f"not YAML: the {'[' if closing == ']' else '{'} of this line is not closed, or a comma is missing",
            None,
            f"close it with {closing}, and put a comma between two items",
            spot.opened,
        )
    if "flow node" in spot.context and "<stream end>" in spot.problem and spot.text.rstrip()[-1:] in ("[", "{"):
        opening = spot.text.rstrip()[-1]
        closing = "]" if opening == "[" else "}"
        what = f"not YAML: the {opening} of this line is not closed"
        return _Finding(
            what, f"{opening} begins a {'list' if opening == '[' else 'mapping'}", f"close it with {closing}"
        )
    if "quoted scalar" in spot.context and "end of stream" in spot.problem:
        return _Finding("not YAML: the quote of this line is not closed", None, "add the second quote", spot.opened)
    pair = _PAIR.fullmatch(spot.text)
    if "unknown escape" in spot.problem:
        return _Finding(
            "not YAML: a backslash in double quotes", "in double quotes \\ begins an escape",
            "use single quotes, or write \\\\" if pair is None or "'" in pair.group(3) or pair.group(3).count('"') != 2
            else f"write `{pair.group(2)}: {pair.group(3).replace(chr(34), chr(39))}`",
        )  # fmt: skip
    return None


def _values(spot: _Spot) -> _Finding | None:
    """Values that begin with a character that means something to YAML."""
    pair = _PAIR.fullmatch(spot.text)
    written = None if pair is None else f"write `{pair.group(2)}: {_quoted(pair.group(3))}`"
    if "cannot start any token" in spot.problem or "expected '<document start>'" in spot.problem:
        return _Finding("not YAML: no value begins with %, @ or `", None, written or "put the value in quotes")
    if "block scalar" in spot.context:
        why = "a value that begins with > or | needs quotes"
        return _Finding(_detail(spot), None, f"{why}: {written}" if written else why)
    if "undefined alias" in spot.problem or "alias" in spot.context:
        what = "not YAML: a value that begins with * is an alias"
        if "undefined alias" in spot.problem:
            what += ", and no &" + spot.problem.split("'")[1] + " is above it"
        if pair is None:
            return _Finding(what, None, 'for the text, put it in quotes: "*"')
        quoted = _STAR.sub(r'"\g<0>"', pair.group(3)) if pair.group(3)[0] in "[{" else _quoted(pair.group(3))
        return _Finding(what, None, f"for the text: write `{pair.group(2)}: {quoted}`")
    return None


def _other(spot: _Spot) -> _Finding:
    return _Finding(_detail(spot))


def _detail(spot: _Spot) -> str:
    return f"not YAML: {spot.problem}" + (f" ({spot.context})" if spot.context else "")


def _quoted(value: str) -> str:
    comment = _LATER.fullmatch(value)
    return json.dumps(value if comment is None else comment.group(1), ensure_ascii=False)


def _shown(line: str) -> str:
    return "..." if show.looks_secret(line) else line.strip()[:60]
