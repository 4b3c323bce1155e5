"""Values of a shell script's variables, as far as they can be known without running anything."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pdserve.importing.shell.lines import IN_QUOTES, SUM, SUM_END, ScriptLimitError, plain

_REFERENCE = re.compile(
    rf"([${IN_QUOTES}])(?:(?P<name>[A-Za-z_]\w*)|\{{(?P<braced>[A-Za-z_]\w*)(?P<all>\[[@*]\])?(?::?-(?P<default>[^}}]{{0,2000}}))?\}})"
    rf"|{SUM}(?P<sum>[^{SUM_END}]{{0,500}}){SUM_END}"
)
_OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_WHOLE = re.compile(r"-?\d{1,18}")
"""What a shell can count with: 64 bits."""
_UNREADABLE = re.compile(rf"[${IN_QUOTES}][\[({{#?!@*0-9$]|`")


_MOST_CHARACTERS = 1 << 22
"""That all expansions of a script make together. A real one makes some thousands."""


class UnknownValueError(ValueError):
    """A value that is known only when the script runs, or to its caller: the variables to give."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(", ".join(sorted(names)))
        self.names = names


@dataclass(frozen=True)
class UnknownValue:
    """The value of a variable depends on these."""

    names: frozenset[str]


Value = str | list[str] | UnknownValue


@dataclass
class Variables:
    """What is assigned so far. `given` by the caller: they hold whatever the script assigns."""

    given: Mapping[str, str]
    values: dict[str, Value] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    made: int = 0
    """Characters and words of all expansions so far."""

    def count(self, values: Sequence[str]) -> None:
        """Raises ScriptLimitError for a script whose variables double each other."""
        self.made += len(values) + sum(map(len, values))
        if self.made > _MOST_CHARACTERS:
            raise ScriptLimitError(f"its variables grow beyond {_MOST_CHARACTERS >> 20} MiB")

    def set(self, name: str, value: Value, line: int) -> None:
        """An assignment."""
        self.values[name] = value
        self.lines[name] = line

    def get(self, name: str) -> Value | None:
        """None: never assigned and not given."""
        return self.given.get(name, self.values.get(name))


def expanded(words: Sequence[str], variables: Variables) -> Iterator[str]:
    """The words with their variables replaced. Raises UnknownValueError."""
    for word in words:
        yield from _expand(word, variables)


def _expand(word: str, variables: Variables) -> list[str]:
    result = [""]
    position = 0
    for match in _REFERENCE.finditer(word):
        _check(word[position : match.start()])
        result[-1] += plain(word[position : match.start()])
        position = match.end()
        values = _resolved(match, variables)
        variables.count(values)
        if match.group("all") or match.group(1) == "$":
            pieces = values if match.group("all") else [piece for value in values for piece in value.split()]
            if not pieces and match.group() == word:
                return []
            result[-1] += pieces[0] if pieces else ""
            result += pieces[1:]
        else:
            result[-1] += " ".join(values)
    _check(word[position:])
    result[-1] += plain(word[position:])
    return result


def _resolved(match: re.Match[str], variables: Variables) -> list[str]:
    if match.group("sum") is not None:
        return [str(_sum(_parsed(plain(match.group("sum"))), variables))]
    name = match.group("name") or match.group("braced")
    value = variables.get(name)
    default = match.group("default")
    if default is not None and value in (None, ""):
        return _expand(default, variables) or [""]
    if value is None:
        raise UnknownValueError(frozenset({name}))
    if isinstance(value, UnknownValue):
        raise UnknownValueError(value.names)
    return value if isinstance(value, list) else [value]


def _parsed(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UnknownValueError(frozenset()) from None


def _sum(node: ast.expr, variables: Variables) -> int:
    """Whole numbers and variables with + - * / %. Both operands of the last two must be positive: a shell rounds
    negative ones otherwise than Python."""
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.Name(id=name):
            value = variables.get(name)
            if isinstance(value, str) and _WHOLE.fullmatch(value) and value.isdecimal():
                return int(value)
            raise UnknownValueError(value.names if isinstance(value, UnknownValue) else frozenset({name}))
        case ast.BinOp(left=left, op=operation, right=right):
            a, b = _sum(left, variables), _sum(right, variables)
            if type(operation) in _OPERATIONS:
                if abs(result := _OPERATIONS[type(operation)](a, b)) >> 63:
                    raise UnknownValueError(frozenset())
                return result
            if isinstance(operation, ast.Div | ast.Mod) and a >= 0 and b > 0:
                return a // b if isinstance(operation, ast.Div) else a % b
    raise UnknownValueError(frozenset())


def _check(text: str) -> None:
    """Commands and other expansions are not evaluated."""
    if _UNREADABLE.search(text):
        raise UnknownValueError(frozenset())


def holds(words: Sequence[str], variables: Variables) -> bool | None:
    """Whether a test ([ ... ] or [[ ... ]]) holds; None where that is not known."""
    if list(words) in (["true"], ["false"]):
        return words[0] == "true"
    if len(words) < 3 or words[0] not in ("[", "[[") or "&&" in words or "||" in words:
        return None
    try:
        inner = [" ".join(_expand(word.replace("$", IN_QUOTES), variables)) for word in words[1:-1]]
    except UnknownValueError:
        return None
    negated = inner[0] == "!"
    inner = inner[1:] if negated else inner
    result = _compared(inner)
    return result if result is None else result != negated


def _compared(words: list[str]) -> bool | None:
    match words:
        case ["-n", text] | [text]:
            return bool(text)
        case ["-z", text]:
            return not text
        case [left, "=" | "==", right] if not set(right) & set("*?["):
            return left == right
        case [left, "!=", right] if not set(right) & set("*?["):
            return left != right
        case [left, "-gt" | "-ge" | "-lt" | "-le" | "-eq" | "-ne" as operator, right]:
            if not (_WHOLE.fullmatch(left) and _WHOLE.fullmatch(right)):
                return None
            a, b = int(left), int(right)
            return {"-gt": a > b, "-ge": a >= b, "-lt": a < b, "-le": a <= b, "-eq": a == b, "-ne": a != b}[operator]
    return None


def depends_on(words: Sequence[str], variables: Variables) -> frozenset[str]:
    """The variables that a test or value depends on and that are not known."""
    names: set[str] = set()
    for word in words:
        for match in _REFERENCE.finditer(word):
            name = match.group("name") or match.group("braced")
            value = variables.get(name) if name else ""
            if isinstance(value, UnknownValue):
                names |= value.names
            elif value is None:
                names.add(name)
    return frozenset(names)
