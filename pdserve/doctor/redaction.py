"""Takes secrets out of a text before it leaves the machine: by their form, by the name beside them, and by their value.

What has none of these (a password in a sentence) stays: the list that comes before a bundle is for people to read.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Collection

from pdserve.doctor.secret_values import without_values
from pdserve.recipe.load import show

REMOVED = "[removed]"
_SHORTEST_VALUE = 8
"""A known secret that is shorter stands in too many places that are none."""
_COLOUR = re.compile(r"(?:\x1b|(?<!\\)\\u001[bB])\[[0-9;:?]{0,40}[A-Za-z]")
"""As it is, and as JSON has it. It may stand between a name and its value."""
_PEM_END = re.compile(r"-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----")
_PEM = re.compile(rf"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----.*?(?:{_PEM_END.pattern}|\Z)", re.DOTALL)
_BASE64 = frozenset(string.ascii_letters + string.digits + "+/=")
_LONGEST_LINE = 128
_SHORTEST_LINE = 16
"""Of what stands behind something else; a shorter one may be a word."""
_CURL = re.compile(
    r"(?P<head>\bcurl\b[^\r\n]{0,512}?(?<![\w-])(?:-[A-Za-z]{0,8}[uU]|--user|--proxy-user)"
    r"(?:[ \t]*=?|\\{0,15}[\"'],?[ \t]*)(?P<quote>\\{0,15}[\"'])?[^\s:\"'\\]{1,128}:)(?!\[removed\])"
    r"(?(quote)(?:(?!(?P=quote))[^\r\n]){1,256}|[^\s\"'\\]+)"
)
"""`curl -u USER:PASSWORD`, as a line or as a list of words."""
_JWT = re.compile(r"(?:(?<![\w.-])|(?<=\\[nrt]))eyJ[\w-]{8,}+\.eyJ[\w-]{4,}+\.[\w-]*+")
_URL_TOKEN = re.compile(r"\b(?P<scheme>https?://)[\w.~%+-]{16,}+(?=@[\w\[])")
"""In place of a user and a password; a shorter one may be a user's name."""
_SCHEME = re.compile(r"\b(?P<scheme>Bearer|Basic)\s+[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)


def redacted(text: str, known: Collection[str] = ()) -> str:
    """`known`: secrets of this run by their value. A JSON document stays valid. Colours go too."""
    text = _COLOUR.sub("", text)
    for form in sorted(_forms(known), key=len, reverse=True):
        text = text.replace(form, REMOVED)
    text = _without_ends_of_keys(_PEM.sub(REMOVED, text))
    text = _CURL.sub(lambda match: f"{match['head']}{REMOVED}", text)
    text = _JWT.sub(REMOVED, text)
    text = show.without_secrets(_SCHEME.sub(lambda match: f"{match['scheme']} {REMOVED}", text), REMOVED)
    text = _URL_TOKEN.sub(lambda match: f"{match['scheme']}{REMOVED}", text)
    return without_values(text, REMOVED)


def _without_ends_of_keys(text: str) -> str:
    """Without private keys whose first lines are in a part that was left out."""
    parts, at = [], 0
    for end in _PEM_END.finditer(text):
        begin = end.start()
        while (line := _line_before(text, begin, at)) is not None:
            begin = line
        parts += [text[at:begin], REMOVED]
        at = end.end()
    return "".join((*parts, text[at:]))


def _line_before(text: str, end: int, floor: int) -> int | None:
    """Where the line of base64 before `end` begins, which ends with a line feed or with that of JSON; None: there is
    none."""
    escaped = text.startswith("\\n", end - 2, end)
    last = end - 2 if escaped else end - 1
    if last <= floor or not (escaped or text[last] == "\n"):
        return None
    first = last
    while first > floor and last - first <= _LONGEST_LINE and text[first - 1] in _BASE64:
        first -= 1
    if first > floor and text[first] == "n" and text[first - 1] == "\\":
        first += 1  # of the line feed before it
    is_word = first > floor and text[first - 1] in " \t" and last - first < _SHORTEST_LINE
    return None if is_word or first == last else first


def _forms(known: Collection[str]) -> set[str]:
    """As they are, and as JSON has them, within JSON too."""
    forms = {each for each in known if len(each) >= _SHORTEST_VALUE}
    for _ in range(2):
        forms |= {json.dumps(each, ensure_ascii=ascii_only)[1:-1] for each in forms for ascii_only in (True, False)}
    return forms
