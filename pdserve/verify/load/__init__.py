"""Proofs under load, `pdserve verify --load`: many requests at once, some cancelled, with reloads in between."""

from pdserve.verify.load.options import LoadOptions
from pdserve.verify.load.run import run_load
from pdserve.verify.load.windows import LoadReport, LoadWindow

__all__ = ["LoadOptions", "LoadReport", "LoadWindow", "run_load"]
