"""Takes secrets out of a text before it leaves the machine: by their form, by the name beside them, and by their value.

What has none of these (a password in a sentence) stays: the list that comes before a bundle is for people to read.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from pdserve.recipe.load import show

REMOVED = "[removed]"
_SHORTEST_VALUE = 8
"""A known secret that is shorter stands in too many places that are none."""
_PEM = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_HEADER = re.compile(
    r"(?<![\w-])(?P<name>(?:proxy-)?authorization|x-api-key|api-key|(?:set-)?cookie)(?P<mark>[\"']?\s*[:=]\s*(?:b?[\"'])?)"
    r"(?P<value>[^\"'\r\n]+)",
    re.IGNORECASE,
)
_SCHEME = re.compile(r"\b(?P<scheme>Bearer|Basic)\s+[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)
_FLAG = re.compile(r"(?<!-)(?P<name>--[a-z0-9-]{1,63})(?P<mark>[\"']?(?:=|,? +)[\"']?)(?P<value>[^\s\"',-][^\s\"',]*)")
_PAIR = re.compile(
    r"(?<!\w)(?P<name>[A-Za-z_][\w-]{0,63})(?P<mark>\\?[\"']?\s*[=:]\s*\\?[\"']?)(?P<value>[^\s\"',;&{}\[\]\\]+)"
)
"""Names have a limit: a word of a million letters must not be gone through from each of them."""
_SIGNED = frozenset({"sig", "signature", "x-amz-signature", "x-goog-signature"})
_LITERALS = frozenset({"true", "false", "null", "none", "None", "True", "False"})


def redacted(text: str, known: Collection[str] = ()) -> str:
    """`known`: secrets of this run by their value. A JSON document stays valid."""
    for value in sorted((each for each in known if len(each) >= _SHORTEST_VALUE), key=len, reverse=True):
        text = text.replace(value, REMOVED)
    text = _PEM.sub(REMOVED, text)
    text = _HEADER.sub(_without_value, text)
    text = _SCHEME.sub(lambda match: f"{match['scheme']} {REMOVED}", text)
    text = show.without_secrets(text, REMOVED)
    text = _FLAG.sub(_of_secret_name, text)
    return _PAIR.sub(_of_secret_name, text)


def _without_value(match: re.Match[str]) -> str:
    return f"{match['name']}{match['mark']}{REMOVED}"


def _of_secret_name(match: re.Match[str]) -> str:
    name, value = match["name"], match["value"]
    if not (show.secret_name(name) or name.lower() in _SIGNED) or value in _LITERALS or REMOVED.startswith(value):
        return match[0]
    # A number in a JSON document must stay a number.
    return f"{name}{match['mark']}{'0' if value.isdecimal() else REMOVED}"
