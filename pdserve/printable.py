"""Text for a terminal: sizes for people, and text of others, which may set a clipboard, a title or colours."""

from __future__ import annotations

import re

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""All but tab and line feed. Those of Latin-1 too: terminals obey them as well."""


def printable(text: str) -> str:
    """Return the text without colours, and with every other control character as `\\x1b`."""
    return _CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", _COLOUR.sub("", text))


def size_text(size: float) -> str:
    """Return a number of bytes for people: `1.5 GiB`, `200 MiB`, `0.1 MiB`."""
    mebibytes = size / 2**20
    if mebibytes >= 1024:
        return f"{mebibytes / 1024:.1f} GiB"
    return f"{mebibytes:.0f} MiB" if mebibytes >= 10 else f"{mebibytes:.1f} MiB"
