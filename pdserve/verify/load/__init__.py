"""Proofs under load, `pdserve verify --load`: many requests at once, some cancelled, with reloads in between."""

from pdserve.verify.load.proofs import LoadReport, LoadWindow, run_load
from pdserve.verify.load.schedule import LoadOptions

__all__ = ["LoadOptions", "LoadReport", "LoadWindow", "run_load"]
