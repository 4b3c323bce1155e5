"""Whether the proxy's hot modules are compiled (hatch_build.py). It is meant to do the same either way."""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec

_COMPILED_MODULE = "pdserve.pd.relay.leg"
"""They are compiled together or not at all."""


def how() -> str:
    """`compiled` or `interpreted`. Imports nothing of the proxy."""
    spec = find_spec(_COMPILED_MODULE)
    origin = "" if spec is None else spec.origin or ""
    return "compiled" if origin.endswith(tuple(EXTENSION_SUFFIXES)) else "interpreted"
