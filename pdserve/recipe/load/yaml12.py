"""YAML text -> plain data plus the line of every key, and back.

Scalars follow YAML 1.2: only `true` and `false` are booleans, so `on:` is a key and `no` a word (YAML 1.1, which
PyYAML implements, reads both as booleans). Refused, because each has silently lost a user's setting: duplicate
keys, keys that are not text, tags, merge keys and several documents in one file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from pdserve.errors import RecipeError
from pdserve.recipe.load import show
from pdserve.recipe.load.problems import Origin, Path, Problem

_INT = re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_RESOLVERS = (("bool", _BOOL, "tTfF"), ("int", _INT, "-+0123456789"), ("float", _FLOAT, "-+.0123456789"))
"""Infinity and NaN are left out: nothing in a recipe can be either, and JSON has no word for them."""
_BREAKS = re.compile("[\x85\u2028\u2029]")
_LINES = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
_NO_TAG = "write the value without a tag; a text that begins with ! needs quotes"
_TAG = "tag:yaml.org,2002:"

MAX_DEPTH = 60
MAX_NODES = 100_000
"""An alias bomb of 300 bytes expands to gigabytes; the largest shipped recipe has 150 nodes."""


class _Loader(yaml.SafeLoader):
    """Composes nodes only; constructing them is done here, with their lines."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own name


class _Dumper(yaml.SafeDumper):
    """Quotes what YAML 1.1 or YAML 1.2 would not read back as the same text. No aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # Unicode's own line breaks end a plain scalar when it is read back; in double quotes they are escaped.
        style = '"' if _BREAKS.search(data) else None
        return self.represent_scalar(_TAG + "str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


for _name, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(_TAG + _name, _pattern, list(_first))
    _Dumper.add_implicit_resolver(_TAG + _name, _pattern, list(_first))
_Loader.add_implicit_resolver(_TAG + "null", _NULL, ["~", "n", "N", ""])


@dataclass(frozen=True)
class ParsedDocument:
    """A document and where each of its paths stands. `quoted`: paths of scalars that were written in quotes."""

    data: Any
    origins: dict[Path, Origin]
    quoted: frozenset[Path]
    problems: tuple[Problem, ...]
    spellings: Mapping[Path, str] = field(default_factory=dict)
    """Numbers, booleans and nulls as they were written, where they are shown otherwise: `0123` for 123."""


def scalar(text: str) -> Any:
    """`text` as a plain YAML 1.2 scalar: a number, a boolean, null, or itself. ValueError on absurd numbers."""
    if _NULL.match(text):
        return None
    if _BOOL.match(text):
        return text.lower() == "true"
    if _INT.match(text):
        return int(text, 0) if text.startswith(("0o", "0x")) else int(text)
    if _FLOAT.match(text):
        number = float(text)
        if math.isinf(number):
            raise ValueError("the number is too large", "write a smaller one")
        return number
    return text


def parse(text: str, name: str) -> ParsedDocument:
    """The one document in `text`. RecipeError where it is not YAML; problems that allow going on are collected."""
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
    except yaml.YAMLError as error:
        raise not_yaml(error, text, name) from None
    except RecursionError:
        raise RecipeError("nested too deeply", where=name) from None
    finally:
        if loader is not None:
            loader.dispose()
    walk = _Walk(name)
    data = None if node is None else walk.value(node, (), depth=0)
    return ParsedDocument(data, walk.origins, frozenset(walk.quoted), tuple(walk.problems), walk.spellings)


def not_yaml(error: yaml.YAMLError, text: str, name: str) -> RecipeError:
    """PyYAML's error with its line and column. `name`: of the file, or an option of the command line."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = " ".join(filter(None, (getattr(error, "context", None), getattr(error, "problem", None))))
    if isinstance(error, yaml.reader.ReaderError):  # a control character, which no YAML file may have
        position = next((i for i, char in enumerate(text) if yaml.reader.Reader.NON_PRINTABLE.match(char)), 0)
        line, column = text.count("\n", 0, position), position - text.rfind("\n", 0, position) - 1
        problem = f"found U+{ord(text[position]):04X}, a control character" if text else str(error)
    elif mark is not None:
        line, column = mark.line, mark.column
        began = getattr(error, "context_mark", None)
        problem += f" (begun in line {began.line + 1})" if began is not None and began.line != line else ""
    else:
        return RecipeError(f"not YAML: {problem or error}", where=name)
    lines = _LINES.split(text)
    shown = lines[line] if line < len(lines) else ""
    return RecipeError(
        f"not YAML: {problem}, at column {column + 1}",
        where=name if name.startswith("--") else f"{name}:{line + 1}",
        todo="a line is key: value or - item, indented with spaces; brackets and quotes are closed; text with a colon "
        "in it, or a special character in front, needs quotes",
        evidence=(show.escape_invisible(shown.rstrip())[:160],)
        if shown.strip() and not show.looks_secret(shown)
        else (),
    )


def dump(data: Mapping[str, Any], width: int = 120) -> str:
    """YAML that `parse` reads back as equal data, in the order of the mapping."""
    return yaml.dump(dict(data), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=width)


def flow(data: Any) -> str:
    """`data` as YAML on one line, without the brackets of a top level."""
    text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=True, width=10_000)
    return text.removesuffix("...\n").strip()


@dataclass
class _Walk:
    file: str
    origins: dict[Path, Origin] = field(default_factory=dict)
    quoted: set[Path] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)
    spellings: dict[Path, str] = field(default_factory=dict)
    nodes: int = 0

    def line(self, node: yaml.Node) -> int:
        """An option of the command line has no lines."""
        return 0 if self.file.startswith("--") else node.start_mark.line + 1

    def value(self, node: yaml.Node, path: Path, depth: int) -> Any:
        self.nodes += 1
        line = self.line(node)
        if depth > MAX_DEPTH or self.nodes > MAX_NODES:
            raise RecipeError(
                "nested too deeply, or too many values after its aliases are expanded",
                where=str(Origin(self.file, line)),
                cause="an alias (*name) that contains itself, or aliases of aliases",
                todo="write the values out, without aliases",
            )
        self.origins.setdefault(path, Origin(self.file, line))
        if isinstance(node, yaml.MappingNode):
            if self.tagged(node, "map", path, line):
                return {}
            return self.mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode):
            if self.tagged(node, "seq", path, line):
                return []
            return [self.value(child, (*path, i), depth + 1) for i, child in enumerate(node.value)]
        return self.scalar(node, path, line)

    def tagged(self, node: yaml.Node, kind: str, path: Path, line: int) -> bool:
        if node.tag == _TAG + kind:
            return False
        self.report(path, line, f"the tag {node.tag} is not supported", _NO_TAG)
        return True

    def mapping(self, node: yaml.MappingNode, path: Path, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = self.line(key_node)
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str) or key_node.tag != _TAG + "str":
                shown = "a list or mapping" if key is None else f"{key or 'null'}"
                self.report((*path, key or "?"), line, f"a key must be text, got {shown}", "put the key in quotes")
                continue
            if key == "<<":
                self.report((*path, key), line, "merge keys (<<) are not supported", "use `extends:` to share settings")
                continue
            if bad := _unusable(key) or _invisible(key):
                self.report((*path, show.escape_invisible(key)), line, f"the key contains {bad}", "delete it")
                continue
            here = (*path, key)
            if key in result:
                first = self.origins[here]
                self.report(here, line, f"the key is there twice, first at {first}", "keep one of them")
                continue
            self.origins[here] = Origin(self.file, line)
            result[key] = self.value(value_node, here, depth + 1)
        return result

    def scalar(self, node: yaml.Node, path: Path, line: int) -> Any:
        text: str = node.value
        if bad := _unusable(text):
            self.report(path, line, f"the value contains {bad}", "delete it")
            return None
        if node.tag == _TAG + "str":
            if getattr(node, "style", None) is not None:
                self.quoted.add(path)
            elif path[-1:] != ("description",) and (bad := _invisible(text)):
                self.report(path, line, f"the value contains {bad}", "delete it, or put the value in quotes")
                return None
            return text
        if node.tag in (_TAG + "bool", _TAG + "int", _TAG + "float", _TAG + "null"):
            try:
                value = scalar(text)
            except ValueError:
                self.report(path, line, "the number is too large", "write a smaller one")
                return None
            if value is not None and text != str(value):
                self.spellings[path] = text
            return value
        self.report(path, line, f"the tag {node.tag} is not supported", _NO_TAG)
        return None

    def report(self, path: Path, line: int, what: str, todo: str | None = None) -> None:
        self.problems.append(Problem(path, what, todo, origin=Origin(self.file, line)))


def _unusable(text: str) -> str | None:
    if "\0" in text:
        return "a NUL character"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "half of a surrogate pair, which is not a character"
    return None


def _invisible(text: str) -> str | None:
    """A character that a reader takes for a space or does not see: it would be part of a name or a path."""
    hidden = next((char for char in text if not char.isprintable() and char not in "\t\n"), None)
    return None if hidden is None else f"the invisible character U+{ord(hidden):04X}"
