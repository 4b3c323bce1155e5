"""Proofs that a running deployment does what its recipe says. Read-mostly: it sends requests and, where the recipe
allows it, clears engines' prefix caches."""

from pdserve.verify.proofs import run_proofs
from pdserve.verify.report import Proof, Report, Status

__all__ = ["Proof", "Report", "Status", "run_proofs"]
