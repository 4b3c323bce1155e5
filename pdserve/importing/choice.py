"""What a file leaves open, and whoever imports it decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class FlagSource(StrEnum):
    """Who knows the flags of engines."""

    VLLM = "vllm"
    """The parser of the vLLM that is installed; without one, the list."""
    LIST = "list"
    """What pdserve knows of one version."""


@dataclass(frozen=True)
class ImportChoice:
    """One deployment of those that a file describes; None: the file's own default, where it has one."""

    variant: str | None = None
    hardware: str | None = None
    strategy: str | None = None
    features: tuple[str, ...] | None = None
    nodes: int | None = None
    kv_offload: str | None = None
    """Of vLLM's recipes; None: KV is kept on the devices alone."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of a shell script."""

    def given(self) -> list[str]:
        """The options that choose something."""
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
