"""What a check of a measurement answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Invalid:
    """The figures do not count."""

    text: str


@dataclass(frozen=True)
class Unknown:
    """It could not be checked."""

    text: str


Answer = Invalid | Unknown | None
"""None: it holds."""
