"""Values of a shell script's variables, as far as they can be known without running anything."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pdserve.importing.shell.lines import IN_QUOTES, SUM, SUM_END, ScriptLimitError, plain

_DOLLAR = f"[${IN_QUOTES}]"
_DEEPEST_DEFAULT = 3


def _default(depth: int) -> str:
    """The pattern of the default in `${X:-default}`, with up to `depth` more `${...}` in each other."""
    inner = f"|{_DOLLAR}{{{_default(depth - 1)}}}" if depth else ""
    return f"(?:[^}}${IN_QUOTES}]|{_DOLLAR}(?!{{){inner}){{0,2000}}"


_REFERENCE = re.compile(
    rf"(?P<dollar>{_DOLLAR})(?:(?P<name>[A-Za-z_]\w*)"
    rf"|{{(?P<braced>[A-Za-z_]\w*)(?P<all>\[[@*]\])?(?:(?P<colon>:?)-(?P<default>{_default(_DEEPEST_DEFAULT)}))?}})"
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
class UnknownWord:
    """A word as it is written, and the variables to give."""

    text: str
    names: frozenset[str]


@dataclass(frozen=True)
class UnknownValue:
    """The value of a variable depends on these. `words`: of an array, where only some of them are not known."""

    names: frozenset[str]
    words: tuple[str | UnknownWord, ...] = ()


Value = str | list[str] | UnknownValue


@dataclass
class Variables:
    """What is assigned and exported so far. `given` by the caller: they hold whatever the script assigns."""

    given: Mapping[str, str]
    values: dict[str, Value] = field(default_factory=dict)
    exported: dict[str, int] = field(default_factory=dict)
    """Name -> line."""
    made: int = 0
    """Characters and words of all expansions so far."""
    before: list[dict[str, tuple[Value | None, int | None]]] = field(default_factory=list)
    """Of what was changed in each open scope: value and export as they were."""

    def count(self, values: Sequence[str]) -> None:
        """Raises ScriptLimitError for a script whose variables double each other."""
        self.made += len(values) + sum(map(len, values))
        if self.made > _MOST_CHARACTERS:
            raise ScriptLimitError(f"its variables grow beyond {_MOST_CHARACTERS >> 20} MiB")

    def set(self, name: str, value: Value) -> None:
        """An assignment."""
        self._keep(name)
        self.values[name] = value

    def export(self, name: str, line: int) -> None:
        """From here on programs get it."""
        self._keep(name)
        self.exported[name] = line

    def unset(self, name: str) -> None:
        """No program gets it, and it is empty."""
        self.set(name, "")
        self.exported.pop(name, None)

    def get(self, name: str) -> Value | None:
        """None: never assigned and not given."""
        return self.given.get(name, self.values.get(name))

    def open_scope(self) -> None:
        """What changes from here on does not last."""
        self.before.append({})

    def close_scope(self) -> dict[str, int | None]:
        """As it was when the last scope was opened. What was changed: name -> the line of its export."""
        before = self.before.pop()
        changed = {name: self.exported.get(name) for name in before}
        for name, (value, line) in before.items():
            if value is None:
                self.values.pop(name, None)
            else:
                self.values[name] = value
            if line is None:
                self.exported.pop(name, None)
            else:
                self.exported[name] = line
        return changed

    def _keep(self, name: str) -> None:
        if self.before:
            self.before[-1].setdefault(name, (self.values.get(name), self.exported.get(name)))


def expanded(words: Sequence[str], variables: Variables) -> Iterator[str]:
    """The words with their variables replaced. Raises UnknownValueError."""
    for word in words:
        yield from _expand(word, variables)


def pieces(words: Iterable[str], variables: Variables) -> Iterator[str | UnknownWord]:
    """The words with their variables replaced, those that are not known between them."""
    for word in words:
        try:
            yield from _expand(word, variables)
        except UnknownValueError as error:
            value = referred(word, variables)
            if isinstance(value, UnknownValue) and value.words:
                yield from value.words
            else:
                yield UnknownWord(word, error.names)


def referred(word: str, variables: Variables) -> Value | None:
    """The value of the variable that is the whole word; None: it is no variable, or one without a value."""
    match = _REFERENCE.fullmatch(word)
    return variables.get(match["name"] or match["braced"]) if match is not None and match["dollar"] else None


def _expand(word: str, variables: Variables) -> list[str]:
    result = [""]
    position = 0
    for match in _REFERENCE.finditer(word):
        _check(word[position : match.start()])
        result[-1] += plain(word[position : match.start()])
        position = match.end()
        values = _resolved(match, variables)
        variables.count(values)
        if match.group("all") or match.group("dollar") == "$":
            parts = [part for value in values for part in value.split()] if match.group("dollar") == "$" else values
            if not parts and match.group() == word:
                return []
            result[-1] += parts[0] if parts else ""
            result += parts[1:]
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
    if default is not None and (value is None or (value in ("", []) and match.group("colon"))):
        return _expand(default, variables) or [""]
    if value is None:
        raise UnknownValueError(frozenset({name}))
    if isinstance(value, UnknownValue):
        raise UnknownValueError(value.names)
    if isinstance(value, list):
        return value if match.group("all") else value[:1] or [""]
    # A caller gives the words of an array as one text.
    return _shell_words(value) if match.group("all") and name in variables.given else [value]


def _shell_words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return [text]


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
    """Whether a test ([ ... ], [[ ... ]] or test ...) holds; None where that is not known."""
    match list(words):
        case ["true" | ":"]:
            return True
        case ["false"]:
            return False
        case ["[", *inner, "]"] | ["[[", *inner, "]]"] | ["test", *inner]:
            either = [all_of(_holds(both, variables) for both in _parts(part, "&&")) for part in _parts(inner, "||")]
            return negated(all_of(negated(each) for each in either))
    return None


def negated(truth: bool | None) -> bool | None:
    """Not; what is not known stays so."""
    return None if truth is None else not truth


def all_of(truths: Iterable[bool | None]) -> bool | None:
    """Whether all hold; None where that is not known."""
    found = set(truths)
    return False if False in found else None if None in found else True


def _parts(words: Sequence[str], between: str) -> Iterator[list[str]]:
    part: list[str] = []
    for word in words:
        if word == between:
            yield part
            part = []
        else:
            part.append(word)
    yield part


def _holds(words: Sequence[str], variables: Variables) -> bool | None:
    try:
        inner = [" ".join(_expand(word.replace("$", IN_QUOTES), variables)) for word in words]
    except UnknownValueError:
        return None
    if inner[:1] == ["!"]:
        return negated(_compared(inner[1:]))
    return _compared(inner)


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
            elif value is None and match["default"] is not None:
                names |= depends_on([match["default"]], variables)
            elif value is None:
                names.add(name)
    return frozenset(names)
