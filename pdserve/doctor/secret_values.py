"""The values beside names of secrets, in the forms in which logs, commands, JSON, YAML and Python write them.

All is linear in the length of a text: nothing is looked at again once a value was taken out, and repetitions that meet
are possessive or have a limit. Only repetitions of one character are possessive: Python before 3.11.5 takes wrong ways
out of a group that is (cpython#106052).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from pdserve.recipe.load import show

Span = tuple[int, int]
Finder = Callable[[str, re.Match[str]], list[Span]]

_NAME = r"[A-Za-z_][\w-]{0,63}"
"""Names have a limit: a word of a million letters must not be gone through from each of them."""
_END_QUOTE = r"\\{0,15}[\"']"
"""Of a name or a value; with its backslashes, where it is within another text."""
_MARK = f"{_END_QUOTE}?"
_GAP = (
    r"[ \t]*+(?:(?:\r?\n[ \t]*+)+(?!\r?\n)"
    rf"(?!{_MARK}{_NAME}{_MARK}[ \t]*(?::(?=\s|\\|\Z)|=[ \t]*[^\s=])))?"
)
"""Between a name and its value. It may stand on the next line, but not where that has a name of its own: the first is
empty then. A value may end with =, as base64 does."""
_IN_DOUBLE = r"(?:\\[^\r\n]|[^\\\"\r\n])+"
_QUOTED = (
    # Quotes that are escaped themselves, as in JSON within JSON: to the same number of backslashes before the quote.
    r"(?P<escape>\\{1,15})(?P<quote>[\"'])"
    r"(?P<nested>(?:(?!(?<!\\)(?P=escape)(?P=quote))(?:\\[^\r\n]|[^\\\"\r\n]))+)"
    rf"|\"(?P<double>{_IN_DOUBLE})"
    # A quote of the other kind belongs to the value only where the value has an end: a line of JSON may be torn. JSON
    # doubles the backslash of an escaped quote, YAML the quote.
    r"|'(?P<single>(?:\\[^\r\n]|''|(?<=\\)'|[^\\'\r\n]){1,256}(?=')|(?:\\[^\r\n]|(?<=\\)'|[^\\\"'\r\n])+)"
)
"""To the quote that ends it and is not escaped, or to the end of the line."""
_BARE = (
    r"(?:(?<=[\"']:)|(?<=[\"']: ))(?P<plain>(?:true|false|null|None|True|False|-?\d[\d.eE+-]*)(?=[\s,)\]}]|\Z))"
    r"|(?P<bare>(?:\[removed\]|(?<==)[\[{](?=[^\s\"'\\\[{])|[^\s\"'\\\[{]|\\[^\s\"'\\])"
    r"(?:\\\S|[\"'](?=[^\s,:;)\]}\"'\\])|[^\s\"'\\])*)"
)
"""To the next space, or to a quote that ends something, as what is after it shows: in a document a value without quotes
stands in a text that has some. A list or a mapping of YAML and JSON is no value; after = a bracket is."""
_PREFIX = r"(?:[bBuUrR]{1,2}(?=\\{0,15}[\"']))?"
"""Of a text of Python."""
_VALUE = re.compile(f"{_QUOTED}|{_BARE}")
_HEADER = re.compile(
    r"(?:(?<![\w-])|(?<=\\[nrt]))(?P<name>(?:proxy-)?authorization|x-api-key|api-key|(?:set-)?cookie)"
    rf"{_MARK}[ \t]*[:=]{_GAP}{_PREFIX}",
    re.IGNORECASE,
)
_WHOLE_LINE = re.compile(
    # What JSON or YAML has in place of a text is for _PAIR.
    rf"{_QUOTED}|(?![\[{{(]\s*+{_PREFIX}{_END_QUOTE})(?!(?:(?<=[\"']:)|(?<=[\"']: ))"
    r"(?:[\[{]|(?:true|false|null|None|True|False|-?\d[\d.eE+-]*+)(?=\s*+(?:[,)\]}]|\Z))))"
    r"(?P<bare>(?:\\[^\r\n]|[^\"'\\\r\n])+)"
)
_FLAG = re.compile(
    r"(?<!-)(?P<name>--[A-Za-z0-9][\w.-]{0,62})"
    r"(?:=|(?:[ \t]+|,[ \t]+|\\{0,15}[\"'](?:,\s*|[ \t]+))(?!\\{0,15}[\"']?--))"
)
_LIST_FLAGS = frozenset({"--api-key", "--api_key"})
"""They take several values."""
_NO_WORD = r"(?!\\{0,15}[\"']?-|[&|;<>#(\[{])"
_AFTER_WORD = re.compile(rf"[ \t]++{_NO_WORD}")
_AFTER_QUOTED = re.compile(rf"{_END_QUOTE}(?:,\s*+|[ \t]++){_NO_WORD}")
_KEY_END = re.compile(rf"{_END_QUOTE}\s*+:")
_ARGUMENT = re.compile(rf"(?<=\")(?P<name>(?:--)?{_NAME})=")
_IN_ARGUMENT = re.compile(f"(?P<double>{_IN_DOUBLE})")
"""A word of a command or an environment that has quotes as a whole."""
_PARAMETER = re.compile(rf"(?<=[?&])(?P<name>{_NAME})=")
_IN_QUERY = re.compile(rf"{_QUOTED}|(?P<bare>(?:[^\s&\"'\\]|\\[^\s\"'])+)")
"""In the query of a URL & ends a value, and nowhere else."""
_PAIR = re.compile(rf"(?<!\w)(?!(?<=[?&]){_NAME}=)(?P<name>{_NAME}){_MARK}[ \t]*[=:]{_GAP}{_PREFIX}")
_ENTRY = re.compile(
    rf"(?<!\w)(?:name|Name|NAME|key|Key|KEY){_MARK}[ \t]*+[:=][ \t]*+{_MARK}"
    rf"(?P<name>{_NAME}){_MARK}\s*+(?:,\s*+)?{_MARK}(?:value|Value|VALUE)"
    rf"{_MARK}[ \t]*[:=]{_GAP}{_PREFIX}"
)
"""`{"name": "HF_TOKEN", "value": "X"}`, as Kubernetes has variables."""
_TWO = re.compile(rf"[(\[]\s*+{_PREFIX}{_END_QUOTE}(?!keys?\b)(?P<name>{_NAME}){_END_QUOTE}\s*+,\s*+{_PREFIX}")
"""`('HF_TOKEN', 'X')`: a name and its value, nothing else."""
_SECOND = re.compile(_QUOTED)
_END_OF_TWO = re.compile(rf"{_END_QUOTE}\s*+,?\s*+[)\]]")
_VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+")

_BLOCK = re.compile(r"[|>][-+0-9]{0,2}[ \t]*+(?:#[^\r\n]*+)?\r?\n")
_LINE = re.compile(r"(?P<indent>[ \t]*+)(?P<text>[^\r\n]*+)(?:\r?\n|\r|\Z)")
_DASH = re.compile(r"-[ \t]+")
_NEXT_DASH = re.compile(r"[^\r\n]*+\r?\n[ \t]*+-[ \t]+")
_AFTER_DASH = re.compile(rf"{_PREFIX}(?:{_QUOTED}|(?!{_NAME}{_MARK}:(?:\s|\Z))(?P<bare>[^\s\"'\[{{][^\r\n]*+))")
_ITEM = re.compile(
    rf"\s*+{_PREFIX}(?:{_QUOTED}|(?P<empty>\"\"|'')"
    r"|(?P<plain>(?:true|false|null|None|True|False|-?\d[\d.eE+-]*+)(?=\s*+[,\])}]))"
    r"|(?P<bare>(?:\[removed\]|[^\s,:\"'\\\[\](){}]++)))"
)
_AFTER_ITEM = re.compile(rf"(?:{_END_QUOTE})?\s*+(?P<then>[,:\])}}])?")

_SIGNED = frozenset({"sig", "signature", "x-amz-signature", "x-goog-signature"})
_HEADERS = frozenset({"authorization", "proxy-authorization", "cookie", "set-cookie"})
_LITERAL = re.compile(r"(?P<value>true|false|null|none|None|True|False|-?\d[\d.eE+-]*)(?P<end>[\s,;&(){}\[\]]*)")
"""No secret, or a number, and what comes after it in a document."""


def without_values(text: str, instead: str) -> str:
    """The text with `instead` in place of each value beside the name of a secret. JSON stays valid."""
    for name, find in _FORMS:
        text = _replaced(text, name, find, instead)
    return text


def _replaced(text: str, name: re.Pattern[str], find: Finder, instead: str) -> str:
    """Names are looked for in values too, but not in those that were removed."""
    parts, at = [], 0
    while (found := name.search(text, at)) is not None:
        spans = find(text, found) if _secret(found["name"]) else []
        for start, end in spans:
            parts += [text[at:start], _shown(text[start:end], instead)]
            at = end
        if not spans:
            parts.append(text[at : found.end()])
            at = found.end()
    return "".join((*parts, text[at:]))


def _shown(value: str, instead: str) -> str:
    literal = _LITERAL.fullmatch(value)
    if literal is None:
        return instead
    # A number in a JSON document must stay a number.
    shown = "0" if literal["value"][-1] in "0123456789." else literal["value"]
    return f"{shown}{literal['end']}"


def _span(match: re.Match[str]) -> Span:
    """Of the group that has the value."""
    values = match.groupdict()
    return match.span(next(name for name in _GROUPS if values.get(name) is not None))


_GROUPS = ("nested", "double", "single", "empty", "plain", "bare")


def _only(value: re.Pattern[str]) -> Finder:
    def find(text: str, found: re.Match[str]) -> list[Span]:
        match = value.match(text, found.end())
        return [] if match is None else [_span(match)]

    return find


def _after_flag(text: str, found: re.Match[str]) -> list[Span]:
    """One value, or several up to the next flag. The next key of a document is none."""
    several = found["name"] in _LIST_FLAGS and text[found.end() - 1] != "="
    spans: list[Span] = []
    after: re.Match[str] | None = found
    while after is not None and (value := _VALUE.match(text, after.end())) is not None:
        words = value["bare"] is not None or value["plain"] is not None
        if not words and _KEY_END.match(text, value.end()):
            break
        spans.append(_span(value))
        after = (_AFTER_WORD if words else _AFTER_QUOTED).match(text, value.end()) if several else None
    return spans


def _second(text: str, found: re.Match[str]) -> list[Span]:
    """Not of a list of two names."""
    match = _SECOND.match(text, found.end())
    if match is None or _END_OF_TWO.match(text, match.end()) is None:
        return []
    start, end = _span(match)
    return [] if _VARIABLE.fullmatch(text, start, end) and _secret(text[start:end]) else [(start, end)]


def _in_document(text: str, found: re.Match[str]) -> list[Span]:
    at = found.end()
    if (block := _BLOCK.match(text, at)) and (lines := _in_block(text, found, block.end())):
        return lines
    if (dash := _DASH.match(text, at)) and "\n" in text[found.end("name") : at]:
        return _in_dashes(text, dash)
    return _in_brackets(text, found) or _only(_VALUE)(text, found)


def _in_block(text: str, found: re.Match[str], at: int) -> list[Span]:
    """The lines of a text of YAML: those that are further right than its name, where that begins its line."""
    before = text[text.rfind("\n", 0, found.start()) + 1 : found.start("name")].rstrip("\"'")
    column, spans = 0 if before.strip(" -") else len(before), []
    while at < len(text) and (line := _LINE.match(text, at)) is not None:
        if line["text"] and len(line["indent"]) <= column:
            break
        if line["text"]:
            spans.append(line.span("text"))
        at = line.end()
    return spans


def _in_dashes(text: str, dash: re.Match[str]) -> list[Span]:
    """The items of a list of YAML."""
    spans: list[Span] = []
    after: re.Match[str] | None = dash
    while after is not None and (item := _AFTER_DASH.match(text, after.end())) is not None:
        spans.append(_span(item))
        after = _NEXT_DASH.match(text, item.end())
    return spans


def _in_brackets(text: str, found: re.Match[str]) -> list[Span]:
    """The items of a list, a tuple or a set: not of a mapping. Words without quotes: after `[` of the same line."""
    at = found.end()
    bracket, spans = text[at : at + 1], list[Span]()
    if bracket not in ("[", "(", "{") or text.startswith("[removed]", at):
        return []
    if found["name"].lower() in ("key", "keys"):  # of a cache, or of a mapping: a log has lists of them
        return []
    words = bracket == "[" and text[at - 1] != "=" and "\n" not in text[found.end("name") : at]
    at += 1
    while (item := _ITEM.match(text, at)) is not None:
        after = _AFTER_ITEM.match(text, item.end())
        then = None if after is None else after["then"]
        if (
            then == ":"
            or (bracket == "{" and then is None)
            or (item["bare"] is not None and not words)
            or (item["plain"] is not None and not words and not spans)
        ):
            break
        if item["empty"] is None:
            spans.append(_span(item))
        if after is None or then != ",":
            break
        at = after.end()
    return spans


@lru_cache(maxsize=4096)
def _secret(name: str) -> bool:
    lower = name.lower()
    return (
        show.secret_name(name)
        or lower in _SIGNED
        or lower in _HEADERS
        or lower == "auth"
        or lower.endswith(("_auth", "-auth"))
    )


_FORMS: tuple[tuple[re.Pattern[str], Finder], ...] = (
    (_HEADER, _only(_WHOLE_LINE)),
    (_ENTRY, _in_document),
    (_TWO, _second),
    (_FLAG, _after_flag),
    (_ARGUMENT, _only(_IN_ARGUMENT)),
    (_PARAMETER, _only(_IN_QUERY)),
    (_PAIR, _in_document),
)
"""A name, and what finds the values after it."""
