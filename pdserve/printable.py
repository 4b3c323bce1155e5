"""Text of others on a terminal: what a log says may set a clipboard, a title or the colour of all that follows."""

from __future__ import annotations

import re

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""All but tab and line feed. Those of Latin-1 too: terminals obey them as well."""


def printable(text: str) -> str:
    """Return the text without colours, and with every other control character as `\\x1b`."""
    return _CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", _COLOUR.sub("", text))
