"""A shell script as simple commands, whose words tell texts, variables and what is not read apart.

Nothing is run. What a shell would split or replace depends on quotes, so each part of a word knows whether it has them.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

from pdserve.errors import RecipeError

COPY = "write the values and the line `vllm serve` out in a copy of the script, and import that"
_LONGEST = 1 << 16
"""Characters of a word. No program takes an argument of twice that many (Linux, MAX_ARG_STRLEN)."""
_SKIPPED = re.compile(r"(?:[ \t]|\\\n)+(?:#[^\n]*)?|#[^\n]*")
_REDIRECTION = re.compile(r"(?:\d+(?=[<>]))?(?:&>>?|<<<|<<-?|<>|>>|>\||[<>]&|[<>](?!\())")
"""A number that touches it is a descriptor. `<(...)` is a word."""
_SEPARATOR = re.compile(r"\n|&&|\|\||\|&|;;&?|;&|[;|&]")
_UP_TO = {
    "": re.compile(r"[^\s;&|()<>'\"\\$`]+"),
    '"': re.compile(r"[^\"\\$`]+"),
    "}": re.compile(r"[^}'\"\\$`]+"),
}
"""Texts without a meaning of their own, by what ends the text around them; empty: the end of the word."""
_ARRAY = re.compile(r"\w+\+?=")
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(\[[@*]\])?(:?[-?]|(?=\})))")
_SPECIAL = re.compile(r"\$[0-9@*#?$!-]|`(?:\\.|[^\\`])*`", re.DOTALL)
_NESTED = re.compile(r"\\.|(?<=\s)#[^\n]*|'[^']*'|\"(?:\\.|[^\"\\])*\"|[(){}]", re.DOTALL)


@dataclass(frozen=True)
class WordPart:
    """A text, a variable with a `name`, or what is known only when the script runs: `$(...)`, a sum, an array."""

    text: str
    """As it stands; of a text without its quotes."""
    is_quoted: bool
    is_read: bool = True
    name: str = ""
    is_array: bool = False
    operator: str = ""
    """In braces: `-` or `?`, with `:` before it where an empty value counts as none."""
    operand: tuple[WordPart, ...] = ()


@dataclass(frozen=True)
class ShellWord:
    """A word of a command, and its line."""

    parts: tuple[WordPart, ...]
    written: str
    line: int

    @property
    def text(self) -> str:
        """Return the word without its quotes, its variables as they are written."""
        return "".join(part.text for part in self.parts)

    @property
    def bare(self) -> str:
        """Return the text outside of quotes, with a mark for all else: it can be a keyword or a pattern."""
        return "".join("\0" if part.is_quoted or part.name or not part.is_read else part.text for part in self.parts)


@dataclass
class ShellCommand:
    """A simple command without its redirections, and the separators around it."""

    start: int
    """The index of its first character."""
    before: str
    words: list[ShellWord] = field(default_factory=list)
    after: str = ";"
    documents: list[str] = field(default_factory=list)
    """Its here-documents."""


def commands(text: str, file: str, lines_before: int = 0) -> Iterator[ShellCommand]:
    """Split a script into its commands. A bracket around commands is a word. Raises RecipeError for what no shell
    would take, where it is reached. `lines_before`: of the file, where the script is a part of it."""
    return _Scanner(text, file, lines_before).commands()


class _Scanner:
    def __init__(self, text: str, file: str, lines_before: int) -> None:
        self.text, self.file, self.lines_before = text, file, lines_before
        self.index = 0
        self.newlines = [match.start() for match in re.finditer("\n", text)]

    def commands(self) -> Iterator[ShellCommand]:
        line = [ShellCommand(0, ";")]
        awaited: list[tuple[str, ShellCommand]] = []
        while self._skip():
            command = line[-1]
            if (match := _REDIRECTION.match(self.text, self.index)) is not None:
                self.index = match.end()
                self._skip()
                target = self._word()
                if match.group().lstrip("0123456789") in ("<<", "<<-"):
                    awaited.append((target.text, command))
            elif (match := _SEPARATOR.match(self.text, self.index)) is not None:
                self.index = match.end()
                is_line = match.group() == "\n"
                if command.words:
                    command.after = ";" if is_line else match.group()
                    line.append(ShellCommand(self.index, command.after))
                elif not is_line:  # a line that ends in `&&` goes on in the next one
                    command.before = match.group()
                if is_line:
                    for end, of in awaited:
                        of.documents.append(self._document(end))
                    awaited = []
                    yield from line[:-1]
                    line = line[-1:]
                    line[0].start = self.index
            else:
                command.words.append(self._word())
        yield from (command for command in line if command.words)

    def _skip(self) -> bool:
        """Go to the next word; whether there is one."""
        if (match := _SKIPPED.match(self.text, self.index)) is not None:
            self.index = match.end()
        return self.index < len(self.text)

    def _document(self, end: str) -> str:
        match = re.compile(rf"^\t*{re.escape(end)}[ \t]*$", re.MULTILINE).search(self.text, self.index)
        if match is None:
            raise self._failure(f"no line {end} ends the text behind <<", self.index)
        document, self.index = self.text[self.index : match.start()], match.end()
        return document

    def _word(self) -> ShellWord:
        start = self.index
        if self.text.startswith(("(", ")"), start):
            self.index += 1
            parts = [WordPart(self.text[start], is_quoted=False)]
        elif self.text.startswith(("<(", ">("), start):
            parts = [self._unread(start + 1)]
        else:
            parts = self._parts("", is_quoted=False)
        if self.index == start:
            raise self._failure("a redirection without its file", start)
        if self.index - start > _LONGEST:
            raise self._failure(f"a word of more than {_LONGEST >> 10} KiB", start)
        return ShellWord(tuple(parts), self.text[start : self.index], self._line(start))

    def _parts(self, end: str, *, is_quoted: bool) -> list[WordPart]:
        """Read up to the character `end`, which is skipped; empty: up to the end of the word."""
        start, parts = self.index, list[WordPart]()
        while (char := self.text[self.index : self.index + 1]) != end and (end or char not in " \t\n;&|()<>"):
            if (match := _UP_TO[end].match(self.text, self.index)) is not None:
                self.index = match.end()
                parts.append(WordPart(match.group(), is_quoted))
                is_array = not end and self.text.startswith("(", self.index)
                if is_array and _ARRAY.fullmatch(self.text, start, self.index) is not None:
                    parts.append(self._unread(self.index))
            elif char == "":
                raise self._failure("a quote or a bracket that never ends", start)
            elif char == "'" and not is_quoted:
                closing = self.text.find("'", self.index + 1)
                if closing < 0:
                    raise self._failure("a quote that never ends", self.index)
                parts.append(WordPart(self.text[self.index + 1 : closing], is_quoted=True))
                self.index = closing + 1
            elif char == '"':
                self.index += 1
                parts += [WordPart("", is_quoted=True), *self._parts('"', is_quoted=True)]
            elif char == "\\":
                following = self.text[self.index + 1 : self.index + 2]
                keeps = is_quoted and following not in '$`"\\\n'
                text = "" if following == "\n" else f"\\{following}" if keeps else following
                parts.append(WordPart(text, is_quoted=is_quoted or text != ""))
                self.index += 2
            else:
                parts.append(self._expansion(is_quoted=is_quoted))
        self.index += len(end)
        return parts

    def _expansion(self, *, is_quoted: bool) -> WordPart:
        """Read what begins with `$` or a backquote, or is a single quote in double ones."""
        start = self.index
        if (match := _VARIABLE.match(self.text, start)) is not None:
            self.index = match.end()
            operand = self._parts("}", is_quoted=is_quoted) if match[2] else []
            text, name = self.text[start : self.index], match[1] or match[2]
            return WordPart(text, is_quoted, True, name, bool(match[3]), match[4] or "", tuple(operand))
        if self.text.startswith(("$(", "${"), start):
            return self._unread(start + 1)
        if not is_quoted and self.text.startswith("$'", start):
            raise self._failure("a quote $'...', which is not read", start)
        match = _SPECIAL.match(self.text, start)
        self.index = start + 1 if match is None else match.end()
        return WordPart(
            self.text[start : self.index],
            is_quoted,
            is_read=match is None and self.text[start : start + 2] not in ('$"', "$["),
        )

    def _unread(self, bracket: int) -> WordPart:
        """Skip the brackets that open at `bracket`."""
        start, depth = self.index, 0
        for match in _NESTED.finditer(self.text, bracket):
            depth += (match.group() in ("(", "{")) - (match.group() in (")", "}"))
            if depth == 0:
                self.index = match.end()
                return WordPart(self.text[start : self.index], is_quoted=False, is_read=False)
        raise self._failure("a bracket that never ends", start)

    def _line(self, index: int) -> int:
        return self.lines_before + bisect_right(self.newlines, index - 1) + 1

    def _failure(self, what: str, index: int) -> RecipeError:
        return RecipeError(
            f"the script cannot be read: {what}",
            where=f"{self.file}:{self._line(index)}",
            cause="a damaged or generated file; no launch of an engine needs this",
            todo=COPY,
        )
