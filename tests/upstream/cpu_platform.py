"""The platform of a machine without an accelerator, for vLLM from its sources."""

from __future__ import annotations

import sys

import vllm.platforms
from vllm.platforms.cpu import CpuPlatform


def on_a_cpu() -> None:
    """Upstream looks for "cpu" in the version of an installed vllm; sources on the path have none."""
    platform = vllm.platforms.current_platform
    if platform.is_cpu():
        return
    vllm.platforms._current_platform = CpuPlatform()
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and vars(module).get("current_platform") is platform:
            module.current_platform = vllm.platforms._current_platform  # type: ignore[attr-defined]
