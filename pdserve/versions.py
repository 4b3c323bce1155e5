"""Versions of the engine environment, as the planner and the patches see them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Versions(BaseModel):
    """Installed versions; None: not installed, or not known where the plan is made."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    vllm: str | None = None
    lmcache: str | None = None
    mooncake: str | None = None
    nixl: str | None = None
