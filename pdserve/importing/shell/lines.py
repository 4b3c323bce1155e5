"""A shell script as simple commands with the line of each word. Nothing is run.

shlex splits the words. What a `$` means depends on its quotes, which shlex removes, so they are marked before:
- in single quotes, or behind a backslash: literal;
- in double quotes: its value stays one word; outside of quotes it is split at blanks.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

LITERAL, IN_QUOTES = "\ue000", "\ue001"
"""Marks in place of a `$`."""
SUM, SUM_END = "\ue003", "\ue004"
"""Marks around `$((...))`, which has no blanks then."""
_OPERATORS = "();<>|&"
_HIDDEN = {char: chr(0xE100 + ord(char)) for char in (*_OPERATORS, "`")}
_SHOWN = str.maketrans({hidden: char for char, hidden in _HIDDEN.items()})
_SUM = re.compile(r"\$\(\(([\w\s${}+*/%()-]{0,500}?)\)\)")
_MARK = re.compile(f"[{LITERAL}-{SUM_END}{chr(0xE100)}-{chr(0xE17F)}]")
_LONGEST_COMMAND = 1 << 16
"""Characters of the lines of one command. No program takes an argument of twice that many (Linux, MAX_ARG_STRLEN)."""
_OPERATOR = re.compile(r"[()]|;;|&&|\|\||&>+|[<>]+&?|[;|&]")
"""shlex gives what stands together as one: `);`."""
_ENDS = frozenset({";", "&&", "||", "|", "&", ";;"})


@dataclass(frozen=True)
class Word:
    """A word or an operator, and its line."""

    text: str
    line: int

    @property
    def is_operator(self) -> bool:
        return bool(self.text) and set(self.text) <= set(_OPERATORS)


class ScriptLimitError(Exception):
    """The script goes beyond what is read of one. The message is a clause; `line` is None where the reader knows it."""

    def __init__(self, what: str, line: int | None = None) -> None:
        super().__init__(what)
        self.line = line


Command = list[Word]
"""The words between two separators; redirections are gone."""


def plain(text: str) -> str:
    """What the marks stand for."""
    return text.replace(LITERAL, "$").translate(_SHOWN)


def commands(text: str) -> Iterator[Command]:
    """The simple commands of a script, in order. A here-document is left out. Raises ScriptLimitError."""
    words: list[Word] = []
    depth = 0
    lines = iter(enumerate(text.splitlines(), 1))
    for number, raw in lines:
        marked, quote = _marked(raw, "")
        parts, length = [marked], len(raw)
        while quote:  # it goes on in the next line
            following = next(lines, None)
            if following is None:
                return
            marked, quote = _marked(following[1], quote)
            parts.append(marked)
            length += len(following[1])
            if length > _LONGEST_COMMAND:
                break
        if length > _LONGEST_COMMAND:
            raise ScriptLimitError(f"a command of more than {_LONGEST_COMMAND >> 10} KiB", number)
        marked = "\n".join(parts).rstrip()
        goes_on = marked.endswith("\\")
        pieces = [Word(token, number) for token in _split(marked.removesuffix("\\"))]
        words += pieces
        depth += sum(word.text.count("(") - word.text.count(")") for word in pieces if word.is_operator)
        if goes_on or depth > 0:
            continue
        depth = 0
        end = _heredoc(words)
        yield from _separated(_without_substitutions(words))
        words = []
        if end is not None:
            for _, inner in lines:
                if inner.strip() == end:
                    break
    yield from _separated(_without_substitutions(words))


def _without_substitutions(words: list[Word]) -> list[Word]:
    """`$(...)` outside of quotes as one word that cannot be read: a backquote."""
    result: list[Word] = []
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not word.text.endswith("$") or index == len(words) or words[index].text != "(":
            result.append(word)
            continue
        result.append(Word(f"{word.text[:-1]}`", word.line))
        depth = 0
        while index < len(words):
            depth += (words[index].text == "(") - (words[index].text == ")")
            index += 1
            if depth == 0:
                break
    return result


def _split(marked: str) -> Iterator[str]:
    lexer = shlex.shlex(marked, posix=True, punctuation_chars=_OPERATORS)
    lexer.whitespace_split = True
    lexer.commenters = ""
    for token in lexer:
        yield from _OPERATOR.findall(token) if token and set(token) <= set(_OPERATORS) else [token]


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
            out += [char, following]
            index += 2
            continue
        if char in "'\"" and quote in ("", char):
            quote = "" if quote else char
        elif char == "#" and not quote and (index == 0 or line[index - 1].isspace()):
            break
        elif char == "$" and quote:
            char = LITERAL if quote == "'" else IN_QUOTES
        elif (quote and char in _HIDDEN and not (quote == '"' and char in "()`")) or (quote == "'" and char in _HIDDEN):
            char = _HIDDEN[char]
        out.append(char)
        index += 1
    return "".join(out), quote


def _heredoc(words: list[Word]) -> str | None:
    for index, word in enumerate(words[:-1]):
        if word.text == "<<":
            return plain(words[index + 1].text).removeprefix("-")
    return None


def _separated(words: list[Word]) -> Iterator[Command]:
    command: Command = []
    index = 0
    depth = 0
    while index < len(words):
        word = words[index]
        if word.is_operator:
            depth += word.text.count("(") - word.text.count(")")
        if word.is_operator and word.text in _ENDS and depth <= 0:
            if command:
                yield command
            command = []
        elif word.is_operator and (word.text[0] in "<>" or word.text.startswith("&>")) and depth <= 0:
            if command and command[-1].text.isdecimal():
                command.pop()
            index += 1
        else:
            command.append(word)
        index += 1
    if command:
        yield command
