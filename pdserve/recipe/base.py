"""The strict base of every recipe model, and the scalars that recipes are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints


class Strict(BaseModel):
    """Unknown keys and wrong types are errors; a loaded recipe never changes."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=False)


class SecretRef(Strict):
    """`{secret: NAME}` names a secret: NAME is looked up in the launcher's environment when the process is started.

    Only the name is ever saved, rendered or logged.
    """

    secret: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] = Field(
        description="Name of the environment variable of the launcher that holds the value."
    )


Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,46}[a-z0-9])?$")]
Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
MOST_GIB = 1_000_000
"""Of memory that a recipe asks for: no node has a pebibyte, and more is a slip of the unit."""

FlagName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9.-]*$")]
FlagValue = bool | int | float | str | list[Any] | dict[str, Any] | None
FlagMap = dict[FlagName, FlagValue]
"""vLLM flags without the dashes. true: --flag, false: --no-flag, null: drop an inherited flag,
list: --flag a b, mapping: --flag with JSON. Never a string that is spliced into a command line."""

EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
EnvValue = str | int | SecretRef
EnvMap = dict[EnvName, EnvValue]
"""Variables of a process. null in a recipe drops an inherited entry of the same mapping (the loader does it)."""


@dataclass(frozen=True, kw_only=True)
class TrialTransfer:
    """A transfer of a connector, tried before its engines start (preflight/fabric.py)."""

    engine: Literal["mooncake", "nixl"]
    pulled: bool
    """Decode reads what prefill has; otherwise prefill writes to decode."""
    host_buffer: bool
    """KV moves through host memory, whatever the device is."""
    ports: str
    """Purpose of ports that an engine process with such transfers has."""


def as_name(text: str) -> str:
    """Return the name of a deployment that is closest to `text`; empty where nothing of it can be in one."""
    kept = "".join(c if c.isascii() and c.isalnum() else "-" for c in text.lower())
    return "-".join(part for part in kept.split("-") if part)[:48].strip("-")
