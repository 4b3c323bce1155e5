"""The base of everything in a plan, and the number of the formats in which pdserve leaves records."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

SchemaVersion = Literal[1]
"""Type of `schema_version` in every record: plan, state, results, sweeps. One number for all of them: it rises when any
of them changes, and a record of another number is refused (run/stored_model.py)."""
SCHEMA: SchemaVersion = 1


class Frozen(BaseModel):
    """Data that crosses a process boundary: exact keys, never changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)
