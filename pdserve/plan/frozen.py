"""The base of everything in a plan."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Data that crosses a process boundary: exact keys, never changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)
