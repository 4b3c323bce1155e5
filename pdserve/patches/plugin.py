"""vLLM calls `load` (entry point group vllm.general_plugins) in the API server, EngineCore and every worker.

vLLM only logs an error of this module's import and goes on without the plugin, so nothing that can fail is imported
here. An error raised by `load` itself ends the process, as it must: a required patch that is missing is a crash later.
"""

from __future__ import annotations

import os

_applied: tuple[str, ...] | None = None


def load() -> None:
    """Applies the patches that PDSERVE_PATCHES names; without it this process is not ours and nothing happens."""
    global _applied
    named = os.environ.get("PDSERVE_PATCHES", "")
    names = tuple(name.strip() for name in named.split(",") if name.strip())
    if not names or names == _applied:
        return
    from pdserve.patches.record import report
    from pdserve.patches.registry import find

    for patch in [find(name) for name in names]:
        patch.apply()
    _applied = names
    report(names, os.environ.get("PDSERVE_PATCH_RECORD"))
