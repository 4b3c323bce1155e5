"""Proofs under load, `pdserve verify --load`: many requests at once, some cancelled, with reloads in between."""

from pdserve.verify.load.run import run_load
from pdserve.verify.load.settings import LoadSettings
from pdserve.verify.load.windows import LoadReport, Window

__all__ = ["LoadReport", "LoadSettings", "Window", "run_load"]
