"""Proof of life of the patches: an engine serves only when every process of it has reported the ones it needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from pdserve.errors import StartError
from pdserve.patches.record import PatchRecord, read_records, shortcomings
from pdserve.plan.model import Plan
from pdserve.plan.process import Process
from pdserve.run.directory import RunDir


def records_folder(run: RunDir, process: str) -> Path:
    """Return where the processes of an engine leave their records; the plan names the same folder in their
    environment."""
    return run.patches / process


def records(run: RunDir, process: str) -> list[PatchRecord]:
    """Return what the processes of an engine have reported since it was started last."""
    return read_records(records_folder(run, process))


def forget(run: RunDir, process: str) -> None:
    """Removes what an earlier start of the process has reported."""
    # A run directory that was deleted or is on a full disk must not keep an engine from being started.
    with contextlib.suppress(OSError):
        for path in records_folder(run, process).glob("*.json"):
            path.unlink()


def list_lacking(process: Process, run: RunDir) -> list[str]:
    """Return what keeps an engine that is healthy from being proven patched, one sentence each; none: it is."""
    if process.ranks is None or process.probe is None:
        return []
    return shortcomings(
        records(run, process.name), process.patches, workers=process.ranks.workers, cores=process.ranks.cores
    )


def find_unpatched_engine(plan: Plan, run: RunDir, names: Iterable[str]) -> StartError | None:
    """Return the error of the first of these engines that does not run with its patches."""
    for name in names:
        process = plan.process(name)
        if problems := list_lacking(process, run):
            return StartError(
                f"{process.role} is healthy, but not every process of it runs with its patches",
                where=f"{name}@{process.node}",
                cause="vLLM did not load pdserve's plugin there: it only logs 'Failed to load plugin' and goes on",
                todo=f"look for 'plugin' in {run.path / process.log}; pdserve must be installed where vLLM is, and a "
                "VLLM_PLUGINS of the recipe must not hide it",
                evidence=tuple(problems),
            )
    return None
