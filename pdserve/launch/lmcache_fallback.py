"""LMCache without its kernels on ROCm: it logs a warning and goes on, with KV that may be wrong.

Its Python copies between host and device are not in the order of the device's stream there (lmcache#4870).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from pdserve.errors import StartError
from pdserve.logs.lines import GrowingLog, message
from pdserve.plan.model import Plan
from pdserve.plan.process import Process
from pdserve.run.directory import RunDir

_WARNING = re.compile(
    r"lmcache\.(?:cuda_ops|c_ops) compiled extension not found"  # 0.5.3 and later
    r"|Failed to import backend lmcache\.c_ops"  # 0.4.6 to 0.5.2
    r"|Fallback to python backend lmcache\."  # until 0.4.5
)


def without_kernels(plan: Plan, run: RunDir) -> StartError | None:
    """The error of the first LMCache server, or engine that uses one, whose log has the warning of missing kernels. On
    other platforms the same words are harmless."""
    if plan.platform != "rocm":
        return None
    for process in _concerned(plan):
        if (line := _warning_of(run, process)) is not None:
            return StartError(
                "LMCache runs without its compiled kernels, and its Python copies may store wrong KV on ROCm",
                where=f"{process.name}@{process.node}",
                cause="the installed LMCache is not a ROCm build, or its kernels do not load there (lmcache#4870)",
                todo="install a -rocm wheel of LMCache's releases, or build it with BUILD_WITH_HIP=1",
                evidence=(f"log: {run.path / process.log}", line),
            )
    return None


def _concerned(plan: Plan) -> Iterator[Process]:
    for process in plan.processes:
        if process.is_lmcache or process.lmcache:
            yield process


def _warning_of(run: RunDir, process: Process) -> str | None:
    log = GrowingLog(run.path / process.log, 0)
    while True:
        for line in map(message, log.step()):
            if _WARNING.search(line):
                return line
        if not log.behind:
            return None
