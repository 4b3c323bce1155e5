"""A launch that was read from a file of another tool: what each role runs, where each value was written, and what the
file has that a recipe does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pdserve.roles import EngineRole


@dataclass(frozen=True)
class ImportChoice:
    """One deployment of those that a file describes; None: the file's own default, where it has one."""

    variant: str | None = None
    hardware: str | None = None
    strategy: str | None = None
    features: tuple[str, ...] | None = None
    nodes: int | None = None
    kv_offload: str | None = None
    """The offloading of vLLM's recipes; None: KV is kept on the devices alone."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """The variables that the caller of a shell script sets (`--var`)."""

    def given(self) -> list[str]:
        """Return the options that choose something."""
        values = {
            "--variant": self.variant,
            "--hardware": self.hardware,
            "--strategy": self.strategy,
            "--feature": self.features,
            "--nodes": self.nodes,
            "--kv-offload": self.kv_offload,
            "--var": self.variables or None,
        }
        return [option for option, value in values.items() if value is not None]


Effect = Literal["served", "confirm", "replaced", "unused"]
"""Of a value that was not carried over as it stands.

served: without it something else is served, or the engines do not start; the import is partial.
confirm: the file leaves it to its site (an alias, a mount); the recipe has the likely value.
replaced: pdserve decides it, or has another word for the same.
unused: it belongs to a benchmark, to the other tool's frontend or to its services; no engine reads it.
"""


@dataclass(frozen=True)
class SourcedValue:
    """A value and where it was written."""

    value: Any
    key: str
    line: int

    def of(self, value: Any) -> SourcedValue:
        """Return another value from the same place."""
        return SourcedValue(value, self.key, self.line)

    def __str__(self) -> str:
        return f"{self.line}: {self.key}" if self.line else self.key


@dataclass(frozen=True)
class Note:
    """Says what was not carried over as it stands. `shown` is fit to be printed."""

    at: SourcedValue
    why: str
    effect: Effect


@dataclass
class EngineLaunch:
    """The engines of one role run this."""

    at: SourcedValue
    """Where the role is described."""
    instances: SourcedValue
    devices: SourcedValue | None = None
    """Devices of one instance, where the file has it beside the flags."""
    args: dict[str, SourcedValue] = field(default_factory=dict)
    """As a recipe has them, without the flags of the parallelism and of the connector."""
    env: dict[str, SourcedValue] = field(default_factory=dict)
    kv_transfer: SourcedValue | None = None
    """vLLM's own mapping."""


@dataclass
class Launch:
    """Holds everything that a recipe is made of."""

    file: str
    format: str
    name: SourcedValue
    platform: SourcedValue
    devices_per_node: SourcedValue | None = None
    model_id: SourcedValue | None = None
    model_path: SourcedValue | None = None
    revision: SourcedValue | None = None
    served_name: SourcedValue | None = None
    """Where no role has a flag for it; None: the end of the model's name."""
    image: SourcedValue | None = None
    frameworks: dict[str, SourcedValue] = field(default_factory=dict)
    """Package -> its version, where the file lists what its image contains."""
    container: dict[str, Any] = field(default_factory=dict)
    """The section as a recipe has it; its leaves are Sourced."""
    setup: list[SourcedValue] = field(default_factory=list)
    slurm: dict[str, Any] = field(default_factory=dict)
    exclude_nodes: list[SourcedValue] = field(default_factory=list)
    engine_env: dict[str, SourcedValue] = field(default_factory=dict)
    hash_seed: SourcedValue | None = None
    store: dict[str, Any] = field(default_factory=dict)
    lmcache: dict[str, Any] = field(default_factory=dict)
    engine_seconds: SourcedValue | None = None
    roles: dict[EngineRole, EngineLaunch] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    def note(self, at: SourcedValue, why: str, effect: Effect) -> None:
        """Add to what was not carried over."""
        self.notes.append(Note(at, why, effect))


@dataclass(frozen=True)
class Draft:
    """A recipe as data, with the origin of each of its values."""

    document: dict[str, Any]
    origins: Mapping[tuple[str | int, ...], str]
    notes: tuple[Note, ...]
    file: str
    format: str
    versions: Mapping[str, SourcedValue] = field(default_factory=dict)
    """Package -> its version, where the file names one (formats.py)."""

    def served(self) -> dict[str, Any]:
        """Return the part of the document that says what is served: without names and the like."""
        others = ("name", "description", "schema", "status")
        return {key: value for key, value in self.document.items() if key not in others}

    def losses(self) -> list[Note]:
        """Return the notes of what changes what is served."""
        return [note for note in self.notes if note.effect == "served"]
