"""Takes secrets out of a text before it leaves the machine: by their form, by the name beside them, and by their value.

What has none of these (a password in a sentence) stays: the list that comes before a bundle is for people to read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from pdserve.recipe.load import show

REMOVED = "[removed]"
_SHORTEST_VALUE = 8
"""A known secret that is shorter stands in too many places that are none."""
_PEM = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_NAME = r"[A-Za-z_][\w-]{0,63}"
"""Names have a limit: a word of a million letters must not be gone through from each of them."""
_GAP = (
    r"[ \t]*+(?:(?:\r?\n[ \t]*+)++"
    rf"(?!\\{{0,15}}[\"']?{_NAME}\\{{0,15}}[\"']?[ \t]*(?::(?=\s|\\|\Z)|=[ \t]*[^\s=])))?+"
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
_HEADER = re.compile(
    r"(?<![\w-])(?P<name>(?:proxy-)?authorization|x-api-key|api-key|(?:set-)?cookie)"
    rf"(?P<mark>\\{{0,15}}[\"']?[ \t]*[:=]{_GAP}(?:b(?=[\"']))?)(?:{_QUOTED}|(?P<bare>(?:\\[^\r\n]|[^\"'\\\r\n])+))",
    re.IGNORECASE,
)
_SCHEME = re.compile(r"\b(?P<scheme>Bearer|Basic)\s+[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)
_VALUE = re.compile(f"{_QUOTED}|{_BARE}")
_FLAG = re.compile(
    r"(?<!-)(?P<name>--[a-z0-9-]{1,63})"
    r"(?:=|(?:[ \t]+|,[ \t]+|\\{0,15}[\"'](?:,\s*|[ \t]+))(?!\\{0,15}[\"']?--))"
)
_ARGUMENT = re.compile(rf"(?<=\")(?P<name>(?:--)?{_NAME})=")
_IN_ARGUMENT = re.compile(f"(?P<double>{_IN_DOUBLE})")
"""A word of a command or an environment that has quotes as a whole."""
_PARAMETER = re.compile(rf"(?<=[?&])(?P<name>{_NAME})=")
_IN_QUERY = re.compile(rf"{_QUOTED}|(?P<bare>(?:[^\s&\"'\\]|\\[^\s\"'])+)")
"""In the query of a URL & ends a value, and nowhere else."""
_PAIR = re.compile(
    rf"(?<!\w)(?!(?<=[?&]){_NAME}=)(?P<name>{_NAME})\\{{0,15}}[\"']?[ \t]*[=:]{_GAP}(?:[bBuUrR]{{1,2}}(?=[\"']))?"
)
_FORMS = ((_FLAG, _VALUE), (_ARGUMENT, _IN_ARGUMENT), (_PARAMETER, _IN_QUERY), (_PAIR, _VALUE))
"""A name, and the value after it."""
_SIGNED = frozenset({"sig", "signature", "x-amz-signature", "x-goog-signature"})
_LITERAL = re.compile(r"(?P<value>true|false|null|none|None|True|False|-?\d[\d.eE+-]*)(?P<end>[\s,;&(){}\[\]]*)")
"""No secret, or a number, and what comes after it in a document."""


def redacted(text: str, known: Collection[str] = ()) -> str:
    """`known`: secrets of this run by their value. A JSON document stays valid."""
    for form in sorted(_forms(known), key=len, reverse=True):
        text = text.replace(form, REMOVED)
    text = _PEM.sub(REMOVED, text)
    text = _HEADER.sub(_without_value, text)
    text = _SCHEME.sub(lambda match: f"{match['scheme']} {REMOVED}", text)
    text = show.without_secrets(text, REMOVED)
    for name, value in _FORMS:
        text = _without_values(text, name, value)
    return text


def _forms(known: Collection[str]) -> set[str]:
    """As they are, and as JSON has them, within JSON too."""
    forms = {each for each in known if len(each) >= _SHORTEST_VALUE}
    for _ in range(2):
        forms |= {json.dumps(each, ensure_ascii=ascii_only)[1:-1] for each in forms for ascii_only in (True, False)}
    return forms


def _without_value(match: re.Match[str]) -> str:
    return f"{match[0][: match.start(_group(match)) - match.start()]}{REMOVED}"


def _without_values(text: str, name: re.Pattern[str], value: re.Pattern[str]) -> str:
    """Names are looked for in values too, but not in those that were removed."""
    parts, at = [], 0
    while (found := name.search(text, at)) is not None:
        end = found.end()
        secret = value.match(text, end) if _secret(found["name"]) else None
        if secret is None:
            parts.append(text[at:end])
        else:
            group = _group(secret)
            parts += [text[at : secret.start(group)], _instead(secret[group])]
            end = secret.end()
        at = end
    return "".join((*parts, text[at:]))


def _instead(value: str) -> str:
    literal = _LITERAL.fullmatch(value)
    if literal is None:
        return REMOVED
    # A number in a JSON document must stay a number.
    shown = "0" if literal["value"][-1] in "0123456789." else literal["value"]
    return f"{shown}{literal['end']}"


def _group(match: re.Match[str]) -> str:
    """The one that has the value."""
    values = match.groupdict()
    return next(name for name in ("nested", "double", "single", "plain", "bare") if values.get(name) is not None)


def _secret(name: str) -> bool:
    return show.secret_name(name) or name.lower() in _SIGNED
