"""Takes secrets out of a text before it leaves the machine: those known by value, and the forms of a table.

What has no form of the table (a password in a sentence) stays: a bundle is for its user to read before it is sent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pdserve.recipe.load.show import KEY_MARKS, secret_name

REMOVED = "[removed]"
_NAME = r"-{0,2}[A-Za-z_][\w-]{0,63}"
"""It has a limit: a word of a million letters must not be gone through from each of them."""
_QUOTE = r"\\{0,7}[\"']"
"""A quote has backslashes where it stands in a text of JSON."""
_PLAIN = r"\[{0,2}\[removed\]|(?:null|none|None|true|false|True|False)(?:[\s,;)\]}\"'\\]|\Z)"
_ANY = (
    rf"(?!{_PLAIN})[bBrRuU]{{0,2}}"
    r"(?:\"((?:\\.|[^\"\\\r\n])+)|'((?:\\.|''|[^'\\\r\n])+)|(\\{1,7}[\"'])((?:(?!(?<!\\)\3)(?:\\.|[^\\\"\r\n]))+)"
    r"|((?:(?<==)|(?![\[({]))[^\s\"'\\](?:[^\s\"'\\]|[\"'](?=[^\s,:;)\]}\"'\\]))*(?:(?<=\[removed\])|(?<![,;)\]}]))))"
)
"""A value in quotes to the quote that ends it, else to the next space, or to a quote that ends something."""
_KEY = r"[A-Za-z0-9_-]+"
_PEM_END = r"-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----"


@dataclass(frozen=True)
class Form:
    """A kind of secret. What `value` matches right after `head` is removed, or the last group of it, if there is one.
    Where `head` has a `name`, that has to be the name of a secret."""

    kind: str
    head: str
    value: str
    example: str


FORMS = (
    Form(
        "PEM private key",
        r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----",
        rf"(?s:.*?)(?={_PEM_END}|\Z)",
        "-----BEGIN PRIVATE KEY-----\nc3dvcmRmaXNo",
    ),
    Form(
        "end of a PEM private key",
        rf"(?m:^)(?=(?:[A-Za-z0-9+/=]{{1,80}}\r?\n){{1,80}}{_PEM_END})",
        rf"(?s:.*?)(?={_PEM_END})",
        "c3dvcmRmaXNo\n-----END PRIVATE KEY-----",
    ),
    Form(
        "header",
        rf"(?i)(?<![\w-])(?:(?:proxy-)?authorization|(?:set-)?cookie)(?:{_QUOTE})?[ \t]*[:=][ \t]*(?:b?{_QUOTE})?",
        rf"(?!{_PLAIN}|[\[({{])[^\"'\\\r\n]+",
        "Authorization: Token swordfish",
    ),
    Form(
        "flag",
        rf"(?<!-)(?P<name>--[A-Za-z][\w-]{{0,62}})(?:=|[ \t]+|{_QUOTE},?[ \t]+)(?!{_QUOTE}--|--)",
        _ANY,
        "--hf-token swordfish",
    ),
    Form(
        "list",
        rf"(?<![\w-])(?!keys?\b)(?P<name>{_NAME})(?:{_QUOTE})?[ \t]*[=:][ \t]*[\[(](?=b?{_QUOTE})",
        r"[^\])\r\n]+",
        "Namespace(api_key=['swordfish', 'b'], port=1)",
    ),
    Form(
        "name and value",
        rf"(?<![\w-])(?P<name>{_NAME})(?:{_QUOTE})?[ \t]*[=:][ \t]*",
        _ANY,
        "HF_TOKEN=swordfish",
    ),
    Form(
        "pair",
        rf"\(b?{_QUOTE}(?P<name>{_NAME}){_QUOTE},[ \t]*(?=b?{_QUOTE})",
        _ANY,
        "[(b'x-api-key', b'swordfish')]",
    ),
    Form("bearer", r"(?i)\b(?:bearer|basic)[ \t]+", r"[A-Za-z0-9._~+/=-]{8,}", "sent Bearer swordfish1234"),
    Form(
        "URL with a password",
        r"://",
        r"(?:[^/\s:\"]*:[^/\s\"]+|[\w.~%+-]{16,})(?=@)",
        "redis://bob:swordfish@host:6379",
    ),
    Form("JSON web token", r"(?<![\w.-])eyJ", r"[\w-]{8,}\.eyJ[\w-]{4,}\.[\w-]+", "eyJhbGciOiJI.eyJzdWIi.dozjgNry"),
    Form("Hugging Face token", KEY_MARKS["Hugging Face"], _KEY, "hf_" + "a" * 30),
    Form("OpenAI-style key", KEY_MARKS["OpenAI and its like"], _KEY, "sk-" + "a1" * 20),
    Form("AWS access key", KEY_MARKS["AWS"], _KEY, "AKIA" + "C" * 16),
    Form("GitHub token", KEY_MARKS["GitHub"], _KEY, "ghp_" + "b" * 36),
    Form("GitLab token", KEY_MARKS["GitLab"], _KEY, "glpat-" + "b" * 20),
    Form("Slack token", KEY_MARKS["Slack"], _KEY, "xoxb-" + "1" * 20),
    Form("key of pdserve's proxy", KEY_MARKS["pdserve's proxy"], _KEY, "pds-" + "d" * 20),
)
"""They are looked for in this order."""
_PATTERNS = [(re.compile(form.head), re.compile(form.value)) for form in FORMS]
_COLOUR = re.compile(r"\x1b\[[0-9;:?]{0,40}[A-Za-z]")
"""It may stand between a name and its value."""
_OTHER_NAMES = re.compile(r"(?:.*[-_])?(?:sig|signature|auth)|(?:proxy-)?authorization|(?:set-)?cookie", re.IGNORECASE)
"""These are names of secrets in logs, and not as keys of a recipe."""
_SHORT = 8
"""A known secret that is shorter is removed only where it stands as a word."""


def redact(text: str, known: Collection[str] = ()) -> str:
    """Return the text without colours and with REMOVED in place of each secret. `known`: secrets by their value."""
    text = _COLOUR.sub("", text)
    as_json = {json.dumps(each, ensure_ascii=ascii_only)[1:-1] for each in known for ascii_only in (True, False)}
    for secret in sorted({*known, *as_json} - {""}, key=len, reverse=True):
        pattern = re.escape(secret)
        text = re.sub(rf"(?<!\w){pattern}(?!\w)" if len(secret) < _SHORT else pattern, REMOVED, text)
    for head, value in _PATTERNS:
        text = _remove_values(text, head, value)
    return text


def redact_json(text: str, known: Collection[str] = ()) -> str:
    """Return the JSON document with REMOVED for each value of a secret's name, and redacted texts elsewhere.

    Raises ValueError where it is not JSON.
    """

    def clean(data: Any, *, secret: bool = False) -> Any:
        match data:
            case dict():
                return {redact(key, known): clean(value, secret=_is_secret(key)) for key, value in data.items()}
            case list():
                flags = [isinstance(each, str) and each.startswith("--") and _is_secret(each) for each in data]
                before = [False, *flags]
                return [clean(each, secret=secret or flag) for flag, each in zip(before, data, strict=False)]
            case bool() | None | "":
                return data
            case _ if secret:
                return REMOVED
            case str():
                return redact(data, known)
        return data

    try:
        return json.dumps(clean(json.loads(text)), indent=2 if "\n" in text.strip() else None)
    except RecursionError as error:
        raise ValueError(str(error)) from None


def _remove_values(text: str, head: re.Pattern[str], value: re.Pattern[str]) -> str:
    """Remove the values behind names of secrets, and match nothing else, so that all is linear in the length of the
    text."""
    parts, at = [], 0
    while (found := head.search(text, at)) is not None:
        start = end = found.end()
        named = found.groupdict().get("name")
        if (named is None or _is_secret(named)) and (match := value.match(text, end)) is not None:
            start, end = match.span(match.lastindex or 0)
            parts += [text[at:start], REMOVED]
        else:
            end = max(found.start() + 1, found.end("name") if named else end)
            parts.append(text[at:end])
        at = end
    return "".join((*parts, text[at:]))


@lru_cache(maxsize=4096)
def _is_secret(name: str) -> bool:
    return secret_name(name) or _OTHER_NAMES.fullmatch(name) is not None
