"""A shell script as simple commands with the line of each word. Nothing is run.

shlex splits the words. What a `$` means depends on its quotes, which shlex removes, so they are marked before:
- in single quotes, or behind a backslash: literal;
- in double quotes: its value stays one word; outside of quotes it is split at blanks.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from pdserve.importing.shell.commands import (
    JOINS,
    OPERATORS,
    Command,
    Word,
    nested,
    separated,
    without_substitutions,
)

LITERAL, IN_QUOTES = "\ue000", "\ue001"
"""Marks in place of a `$`."""
SUM, SUM_END = "\ue003", "\ue004"
"""Marks around `$((...))`, which has no blanks then."""
_HIDDEN = {char: chr(0xE100 + ord(char)) for char in (*OPERATORS, "`")}
_SHOWN = str.maketrans({hidden: char for char, hidden in _HIDDEN.items()})
_SUM = re.compile(r"\$\(\(([\w\s${}+*/%()-]{0,500}?)\)\)")
_MARK = re.compile(f"[{LITERAL}-{SUM_END}{chr(0xE100)}-{chr(0xE17F)}]")
_LONGEST_COMMAND = 1 << 16
"""Characters of the lines of one command. No program takes an argument of twice that many (Linux, MAX_ARG_STRLEN)."""
_MOST_WORDS = 1 << 15
"""Of all commands that are joined, and the words of an array."""
_OPERATOR = re.compile(r"\(\(|[()]|;;&?|;&|&&|\|\||\|&|&>+|[<>]+[&|]?|[;|&]")
"""shlex gives what stands together as one: `);`."""
_DESCRIPTOR = re.compile(r"[0-9]+(?=[<>])")
"""`2>file`: a number that touches what redirects it is no word. shlex drops the blank that tells them apart."""


class ScriptLimitError(Exception):
    """The script goes beyond what is read of one. The message is a clause; `line` is None where the reader knows it."""

    def __init__(self, what: str, line: int | None = None) -> None:
        super().__init__(what)
        self.line = line


def plain(text: str) -> str:
    """What the marks stand for."""
    return text.replace(LITERAL, "$").translate(_SHOWN)


def commands(text: str) -> Iterator[Command]:
    """The simple commands of a script, in order. A here-document is left out. Raises ScriptLimitError."""
    words: list[Word] = []
    depth = 0
    end: str | None = None
    lines = iter(enumerate(text.splitlines(), 1))
    for number, raw in lines:
        marked, quote = _marked(raw, "")
        parts, length = [marked], len(raw)
        while quote:  # it goes on in the next line
            following = next(lines, None)
            if following is None:
                return
            # In double quotes a backslash at the end of a line takes the line's end with it.
            parts[-1] = marked[:-1] if quote == '"' and _goes_on(marked) else f"{marked}\n"
            marked, quote = _marked(following[1], quote)
            parts.append(marked)
            length += len(following[1])
            if length > _LONGEST_COMMAND:
                break
        if length > _LONGEST_COMMAND:
            raise ScriptLimitError(f"a command of more than {_LONGEST_COMMAND >> 10} KiB", number)
        marked = "".join(parts).rstrip()
        goes_on = _goes_on(marked)
        pieces = [Word(token, number) for token in _split(marked[:-1] if goes_on else marked)]
        for word in pieces:
            depth = nested(words[-1].text if words else "", word.text, depth)
            words.append(word)
        if len(words) > _MOST_WORDS:
            raise ScriptLimitError(f"a command of more than {_MOST_WORDS} words", number)
        end = end or _heredoc(pieces)
        if goes_on or depth > 0 or (end is None and words and words[-1].text in JOINS):
            continue
        yield from separated(without_substitutions(words))
        words = []
        if end is not None:
            for _, inner in lines:
                if inner.strip() == end:
                    break
        end = None
    yield from separated(without_substitutions(words))


def _goes_on(text: str) -> bool:
    """Whether a backslash at its end takes the end of the line away: one that is not behind another."""
    return (len(text) - len(text.rstrip("\\"))) % 2 == 1


def _split(marked: str) -> Iterator[str]:
    lexer = shlex.shlex(marked, posix=True, punctuation_chars=OPERATORS)
    lexer.whitespace_split = True
    lexer.commenters = ""
    for token in lexer:
        yield from _OPERATOR.findall(token) if token and set(token) <= set(OPERATORS) else [token]


def check_marks(text: str) -> None:
    """Raises ScriptLimitError for a text that has one of our marks already."""
    if (mark := _MARK.search(text)) is not None:
        line = text.count("\n", 0, mark.start()) + 1
        raise ScriptLimitError(f"the private character U+{ord(mark.group()):04X}, which means nothing in a shell", line)


def _marked(line: str, quote: str) -> tuple[str, str]:
    """The line with its marks and without its comment, and the quote that is open at its end. `quote`: the one that is
    open at its beginning."""
    out: list[str] = []
    index = 0
    while index < len(line):
        char = line[index]
        following = line[index + 1 : index + 2]
        if char == "\\" and quote != "'" and following == "$":
            out.append(LITERAL)
            index += 2
            continue
        if quote != "'" and (sum_ := _SUM.match(line, index)) is not None:
            inner = re.sub(r"[\s${}]", "", sum_.group(1))
            out += [SUM, *(_HIDDEN.get(each, each) for each in inner), SUM_END]
            index = sum_.end()
            continue
        if char == "\\" and quote != "'" and following:
            out += [_HIDDEN[following]] if not quote and following in _HIDDEN else [char, following]
            index += 2
            continue
        at_start = index == 0 or line[index - 1].isspace() or line[index - 1] in OPERATORS
        if not quote and at_start and (descriptor := _DESCRIPTOR.match(line, index)) is not None:
            index = descriptor.end()
            continue
        if char in "'\"" and quote in ("", char):
            quote = "" if quote else char
        elif char == "#" and not quote and (index == 0 or line[index - 1].isspace()):
            break
        elif char == "$" and quote:
            char = LITERAL if quote == "'" else IN_QUOTES
        elif quote and char in _HIDDEN and not (quote == '"' and _substitutes(line, index)):
            char = _HIDDEN[char]
        out.append(char)
        index += 1
    return "".join(out), quote


def _heredoc(words: list[Word]) -> str | None:
    for index, word in enumerate(words[:-1]):
        if word.text == "<<":
            return plain(words[index + 1].text).removeprefix("-")
    return None


def _substitutes(line: str, index: int) -> bool:
    """Whether a command stands there in double quotes, whose output is a value."""
    return line[index] == "`" or line[max(index - 1, 0) : index + 1] == "$("
