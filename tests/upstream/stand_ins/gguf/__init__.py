"""Stands in for gguf, which vLLM before 0.23 imports everywhere and needs for files of that format only."""

from . import constants, quants

__version__ = "0.10.0"
__all__ = ["constants", "quants"]
