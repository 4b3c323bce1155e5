"""Characters that look like a space or like nothing: no-break spaces, zero-width marks, marks of direction."""

from __future__ import annotations

import unicodedata

_SPACES = ("Zs", "Zl", "Zp")
_NOTHING = ("Cf", "Cc")
_PLAIN = " \t\n\r"


def first(text: str) -> tuple[int, str] | None:
    """Where the first such character stands, counted from 0, and what it is: `U+00A0 (NO-BREAK SPACE)`."""
    return next(((index, name(char)) for index, char in enumerate(text) if _invisible(char)), None)


def name(char: str) -> str:
    """The code point, and Unicode's name of it where it has one."""
    known = unicodedata.name(char, "")
    return f"U+{ord(char):04X}" + (f" ({known})" if known else "")


def cleaned(text: str) -> str:
    """The text with plain spaces in place of the others, and without what has no width."""
    kept = (" " if unicodedata.category(c) in _SPACES else "" if _invisible(c) else c for c in text)
    return "".join(kept).strip()


def escaped(text: str) -> str:
    """The text with each of them as `\\u00a0`."""
    return "".join(f"\\u{ord(c):04x}" if _invisible(c) else c for c in text)


def _invisible(char: str) -> bool:
    return char not in _PLAIN and unicodedata.category(char) in (*_SPACES, *_NOTHING)
