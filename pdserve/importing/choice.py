"""What a file leaves open, and whoever imports it decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ImportChoice:
    """One deployment of those that a file describes; None: the file's own default, where it has one."""

    variant: str | None = None
    hardware: str | None = None
    strategy: str | None = None
    features: tuple[str, ...] | None = None
    nodes: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of a shell script."""
