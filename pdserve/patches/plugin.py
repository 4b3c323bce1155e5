"""vLLM calls `load` (entry point group vllm.general_plugins) in the API server, EngineCore and every worker.

vLLM only logs an error of this module's import and goes on without the plugin, so nothing that can fail is imported
here. An error raised by `load` itself ends the process, as it must: a required patch that is missing is a crash later.
"""

from __future__ import annotations

import os

_loaded: str | None = None


def load() -> None:
    """Apply the patches that PDSERVE_PATCHES names; without it this process is not ours and nothing happens."""
    global _loaded
    named = os.environ.get("PDSERVE_PATCHES", "")
    if named == _loaded or not named.strip(" ,"):
        return
    from pdserve.patches.loader import load_named

    load_named(
        named.split(","),
        allow_unknown=os.environ.get("PDSERVE_PATCHES_ALLOW_UNKNOWN", "").split(","),
        folder=os.environ.get("PDSERVE_PATCH_RECORD"),
    )
    _loaded = named
