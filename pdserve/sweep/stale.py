"""Points that are over, and whose figures do not stand any more: their result is gone, they began with a cache that was
not empty, or they were measured with other engines, on other hardware, or with another model than would be used here.

What is known of both sides is compared, nothing else. A login node is not where the tasks of an array measure: there a
difference is only named, and a task compares on its own node.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from pdserve.bench.result import BenchResult, circumstances_here, differences, fixed_circumstances, machine, read_result
from pdserve.errors import PreflightError, StateError
from pdserve.installed.versions import PACKAGES
from pdserve.operations.plan_recipe import model_files
from pdserve.plan.slurm_nodes import expand_nodelist
from pdserve.preflight.engine_packages import read_versions
from pdserve.recipe.load.loader import LoadedRecipe
from pdserve.sweep.caches import find_full_cache
from pdserve.sweep.file import by_deployment
from pdserve.sweep.record import PointRecord, SweepFolder, arrays_of, job_of
from pdserve.sweep.resolve import PlannedSweep

GONE = "its result is gone or cannot be read"
_HARDWARE = ("CPU", "CPUs", "GPUs")

Here = Callable[[LoadedRecipe], Mapping[str, str]]
"""What is known of a deployment as it would be measured now (pdserve.bench.result.fixed_circumstances)."""


@dataclass(frozen=True)
class StalePoints:
    """Holds by the id of a point why it is stale."""

    again: Mapping[str, str] = field(default_factory=dict)
    """They are measured again."""
    named: Mapping[str, str] = field(default_factory=dict)
    """They differ from what is here, and this may not be where they would be measured: they stay."""


def stale_points(planned: PlannedSweep, folder: SweepFolder, here: Here, *, measured_here: bool) -> StalePoints:
    """Find the points whose results are not what would be measured now. `measured_here`: what is here is what would be
    measured. Raises StateError for a record that cannot be read."""
    again: dict[str, str] = {}
    named: dict[str, str] = {}
    for deployment, points in by_deployment(planned.points):
        now: Mapping[str, str] | None = None
        for point in points:
            record = folder.read(point)
            if record is None or record.result is None:
                continue
            if planned.loaded.sweep.restart_to_empty_caches and (full := find_full_cache(record.caches)) is not None:
                again[point.id] = f"measured with a cache that was not empty ({full[0]}: {full[1]})"
                continue
            result = _result(folder.point(point), record)
            if result is None:
                again[point.id] = GONE
                continue
            now = here(planned.recipes[deployment.digest]) if now is None else now
            known = now if measured_here else {name: value for name, value in now.items() if name not in _HARDWARE}
            if (why := differences(fixed_circumstances(result.provenance), known)) is not None:
                (again if measured_here else named)[point.id] = why
    return StalePoints(again, named)


def is_measured_here(folder: SweepFolder, environ: Mapping[str, str], *, array: bool) -> bool:
    """Return whether a sweep measures on this machine, or on the nodes of the job around it. `array`: it is to be
    submitted. One that was submitted before is looked at from a login node later. Raises StateError."""
    return not array and (job_of(environ) is not None or not arrays_of(folder))


def known_here(environ: Mapping[str, str], *, this_machine: bool) -> Here:
    """Return what tells the circumstances of a recipe here. `this_machine`: inside a job, this one only."""
    hardware = cache(machine)

    def known(loaded: LoadedRecipe) -> Mapping[str, str]:
        recipe = loaded.recipe
        versions: Mapping[str, str | None] = {}
        # In an image, or on nodes of which this machine is none, are other versions.
        if recipe.container is None and (this_machine or _in_its_job(environ)):
            installed = read_versions(recipe.engine.python, missing_ok=True)
            versions = {package: getattr(installed, package) for package in PACKAGES}
        return circumstances_here(versions, model_files(loaded), hardware(recipe.platform))

    return known


def _in_its_job(environ: Mapping[str, str]) -> bool:
    """Return whether this machine is one of the job's nodes; without a job it is the only one."""
    nodes = environ.get("SLURM_JOB_NODELIST") if job_of(environ) is not None else None
    if not nodes:
        return True
    try:
        names = expand_nodelist(nodes, where="SLURM_JOB_NODELIST")
    except PreflightError:  # the start of a deployment has the reason
        return False
    return socket.gethostname().partition(".")[0] in {name.partition(".")[0] for name in names}


def _result(place: Path, record: PointRecord) -> BenchResult | None:
    try:
        return read_result(place, str(place / str(record.result)))
    except StateError:
        return None
