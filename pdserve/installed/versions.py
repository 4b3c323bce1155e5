"""Versions of the engine environment, as the planner and the patches see them."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict

TESTED = {"vllm": "0.32.0", "lmcache": "0.5.6", "mooncake": "0.3.13.post1"}
"""What the whole path ran on, on CPU."""

KNOWN = {"vllm": ">=0.26,<0.34", "lmcache": ">=0.5.6,<0.6", "mooncake": ">=0.3.13,<0.4"}
"""Versions whose code was read for the facts that plans rest on. Outside of them a plan is a guess."""

TITLES = {
    "vllm": "vLLM",
    "lmcache": "LMCache",
    "mooncake": "Mooncake's transfer engine",
    "nixl": "NIXL",
    "mori": "MoRI",
}
"""The parts of an engine environment, in the order in which they are shown -> their names for people."""

PACKAGES = tuple(TITLES)


class Versions(BaseModel):
    """Holds the installed versions; None: not installed, or not known where the plan is made."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    vllm: str | None = None
    lmcache: str | None = None
    mooncake: str | None = None
    nixl: str | None = None
    mori: str | None = None
    same_code: Mapping[str, str] = {}
    """Package -> the release whose code an untagged build has (patches/verdict.py)."""

    def as_releases(self) -> Versions:
        """Return the versions with the release in place of each untagged build whose code it has: what is known of it
        holds."""
        return self.model_copy(update={**self.same_code, "same_code": {}})
