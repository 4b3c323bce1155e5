"""Values as an error message may show them, and which names hold secrets."""

from __future__ import annotations

import re
from typing import Any

_SECRET_WORDS = frozenset(
    {"TOKEN", "KEY", "KEYS", "APIKEY", "ACCESSKEY", "SECRET", "SECRETS", "CREDENTIAL", "CREDENTIALS"}
    | {"PASSWORD", "PASSWD", "PASSPHRASE"}
)
_NOT_SECRET_ENDS = ("FILE", "PATH", "DIR", "ID", "IDS", "NAME", "THRESHOLD", "ERROR", "EXCEPTION")
_TEXT_TOKENS = frozenset({"PER", "FIRST", "NEXT", "LAST", "EOS", "BOS", "PAD", "UNK", "SEP", "CLS", "MASK", "IMAGE"})
_CACHE_KEYS = frozenset({"BLOCK", "CHUNK", "CACHE", "KV", "LAYER", "MISSING", "UNEXPECTED", "SORT", "PUBLIC"})
_NOT_SECRET_AFTER = {"TOKEN": _TEXT_TOKENS, "KEY": _CACHE_KEYS, "KEYS": _CACHE_KEYS}
"""Tokens of a text and keys of a cache."""
_MEASURES = frozenset({"COUNT", "COUNTS", "BUDGET", "LIMIT", "LENGTH", "SIZE", "RATE", "SECONDS", "LATENCY"})
_ABBREVIATED = re.compile(
    r"(?:[A-Z0-9]+_)+PASS|(?:(?!old)[a-z0-9]+_)+pwd|(?:(?!OLD)[A-Z0-9]+_)+PWD|(?:db|user|smtp|redis)_pass"
)
"""Not PWD and OLDPWD, which are folders, nor a fusion_pass."""
KEY_MARKS = {
    owner: rf"(?<![A-Za-z0-9])(?:{mark})(?={rest})"
    for rest, marks in {
        r"[A-Za-z0-9_-]{20}": {
            "Hugging Face": "hf_",
            "OpenAI and its like": "sk-",
            "GitHub": "gh[pousr]_|github_pat_",
            "GitLab": "glpat-",
            "Slack": "xox[abprs]-",
            "pdserve's proxy": "pds-",
        },
        r"[A-Z0-9]{16}\b": {"AWS": "AKIA"},
    }.items()
    for owner, mark in marks.items()
}
"""Whose key or token it is -> the mark that it begins with."""
_KEY_MARK = re.compile("|".join(KEY_MARKS.values()))
_CREDENTIALS_IN_URL = re.compile(r"://[^/\s:\"]*:[^/\s\"]+@")
"""Without a user name too, as Redis has it. A password may have an @ that is not escaped: the last one ends it."""


def secret_name(name: str) -> bool:
    """Return whether a variable or key of this name usually holds a secret: HF_TOKEN does, TOKENIZERS_PARALLELISM,
    MAX_TOKENS, SSL_KEY_FILE, KeyError, max_load_batch_keys and long-prefill-token-threshold do not."""
    words = [w for w in re.split(r"[^A-Z0-9]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", name).upper()) if w]
    if words[:1] in (["MAX"], ["MIN"], ["NUM"]) and words[-1] in ("KEYS", "TOKEN"):
        return False
    if not words or words[-1] in _NOT_SECRET_ENDS or words[-1] in _MEASURES:
        return False
    pairs = zip(("", *words), words, strict=False)
    return _ABBREVIATED.fullmatch(name) is not None or any(
        word.endswith("PASSWORD") or (word in _SECRET_WORDS and before not in _NOT_SECRET_AFTER.get(word, ()))
        for before, word in pairs
    )


def secret_value(value: object) -> bool:
    """Return whether a text carries credentials wherever it stands: https://user:password@host, or a key of a known
    form."""
    return isinstance(value, str) and bool(_CREDENTIALS_IN_URL.search(value) or token(value))


def token(value: str) -> str | None:
    """The mark of a key or token whose form shows whose it is: hf_, sk-, ghp_, ..."""
    match = _KEY_MARK.search(value)
    return None if match is None else match.group()


def looks_secret(text: str) -> bool:
    """Return whether a line of text should not be repeated in a message."""
    return any(secret_name(word) for word in re.findall(r"[A-Za-z0-9_-]+", text)) or secret_value(text)


def value(data: Any, limit: int = 60) -> str:
    """`data` as YAML would write it, short, with its kind where that is the point."""
    if data is None:
        return "null"
    if isinstance(data, bool):
        return "true" if data else "false"
    if isinstance(data, list):
        return "a list"
    if isinstance(data, dict):
        return "a mapping"
    if isinstance(data, str):
        if secret_value(data):
            return "a text with credentials"
        data = escape_invisible(data)
        return f'"{data}"' if len(data) <= limit else f'"{data[:limit]}..."'
    text = str(data)
    return text if len(text) <= limit else f"{text[:limit]}..."


def escape_invisible(text: str) -> str:
    """The text with the code of each character that a reader would not see, as `\\u00a0`."""
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)


def redact_value(path_end: str | int, data: Any) -> str:
    """`value`, or only its kind where the key's name marks a secret."""
    if secret_name(str(path_end)) and isinstance(data, str | int | float) and not isinstance(data, bool):
        return "a literal value (not shown)"
    return value(data)
