"""What a patch declares about itself. Pure data: reading it imports no engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

Platform = Literal["cpu", "cuda", "rocm"]
ProcessKind = Literal["api-server", "engine-core", "worker"]


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One correction. `apply` imports its target lazily, checks it, wraps it, and may be called again."""

    name: str
    summary: str
    """What goes wrong without it and what it does, in at most three lines."""
    issue: str
    """Where upstream discusses it."""
    vllm: str
    """Versions of vllm that need it (PEP 440); empty: all that are known."""
    targets: tuple[str, ...]
    """Dotted names of what is wrapped."""
    runs_in: tuple[ProcessKind, ...]
    """Where it has an effect. It is applied in every process of the engine all the same."""
    connectors: frozenset[str]
    """Class names of connectors that must all be in use for it to be needed."""
    platforms: tuple[Platform, ...]
    required: bool
    """Without it a deployment that needs it does not work: an engine refuses to start rather than run unpatched."""
    remove_when: str
    apply: Callable[[], None]

    def needed(self, *, vllm: str | None, platform: str, connectors: frozenset[str]) -> bool:
        """Whether a deployment needs it. A version of vllm that cannot be told counts as one that does."""
        if platform not in self.platforms or not self.connectors <= connectors:
            return False
        try:
            return vllm is None or in_range(vllm, self.vllm)
        except InvalidVersion:
            return True


def in_range(version: str, specifier: str) -> bool:
    """As PEP 440, but `<0.33` holds for 0.33's own pre-releases: they may still have the defect."""
    known = Version(version)
    return all(
        known < Version(clause.version) if clause.operator == "<" else clause.contains(known, prereleases=True)
        for clause in SpecifierSet(specifier)
    )
