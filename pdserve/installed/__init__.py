"""The installed engines, read from package metadata and files, and the build of the proxy: nothing is imported."""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec

_COMPILED_MODULE = "pdserve.pd.relay.leg"
"""The hot modules of the proxy are compiled together or not at all (hatch_build.py)."""


def proxy_build() -> str:
    """Return `compiled` or `interpreted`: it is meant to do the same either way. Imports nothing of the proxy."""
    spec = find_spec(_COMPILED_MODULE)
    origin = "" if spec is None else spec.origin or ""
    return "compiled" if origin.endswith(tuple(EXTENSION_SUFFIXES)) else "interpreted"
