"""Bring the words of a command line to a plan: load the recipe, learn the versions, place it on nodes."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.errors import PdserveError
from pdserve.models import files
from pdserve.models.files import model_identity
from pdserve.plan.build import build_plan
from pdserve.plan.model import Plan, Versions
from pdserve.plan.node import Node
from pdserve.plan.placement import nodes_for
from pdserve.plan.running import NOTHING, RunningProcesses
from pdserve.plan.sbatch import check_job_time, render_sbatch, signal_seconds
from pdserve.preflight.engine_packages import read_versions
from pdserve.reach.cluster_file import LoadedCluster
from pdserve.recipe import effective
from pdserve.recipe.load.loader import LoadedRecipe, load_recipe

_KEY = re.compile(r"[a-z_0-9]+(\.[A-Za-z_0-9-]+)*")


@dataclass(frozen=True)
class PlannedRecipe:
    """Holds a plan and what it was made of."""

    plan: Plan
    loaded: LoadedRecipe
    versions: Versions
    model_config: dict[str, Any] | None = None
    """This is the config.json of the model, where it was at hand."""


def load(path: Path, set_: Sequence[str], unset: Sequence[str]) -> LoadedRecipe:
    """Load a recipe with the overrides of the command line and this process's environment."""
    return load_recipe(path, set_=set_, unset=unset, environ=os.environ)


def plan_for(
    loaded: LoadedRecipe,
    nodes: Sequence[Node] | None,
    *,
    run_dir: str,
    run_id: str,
    versions: Versions | None = None,
    online: bool = False,
    running: RunningProcesses = NOTHING,
) -> PlannedRecipe:
    """Plan for `nodes`, or for hypothetical ones of the recipe's own kind. `versions`: what is installed on the nodes;
    None: they are this machine, or like it. `online`: as `model_config` has it; `running`: as `build_plan`."""
    recipe = loaded.recipe
    # Of hypothetical nodes; others name their interpreter themselves.
    inside = recipe.container if nodes is None else None
    python = sys.executable if inside is None else inside.python
    if versions is None:
        versions = read_versions(recipe.engine.python, missing_ok=nodes is None)
    with errors_with_lines(loaded):
        config = model_config(loaded, online=online)
        plan = build_plan(
            recipe,
            nodes_for(recipe) if nodes is None else nodes,
            run_dir=run_dir,
            run_id=run_id,
            versions=versions,
            python=python,
            recipe_dir=str(loaded.path.parent.absolute()),
            recipe_file=str(loaded.path),
            model_config=config,
            running=running,
        )
    return PlannedRecipe(plan, loaded, versions, config)


def model_folder(loaded: LoadedRecipe) -> Path | None:
    """Return where the model lies on this machine: its folder, or its snapshot in the hub's cache that the engines
    would use here; None: it is in no cache."""
    recipe = loaded.recipe
    if recipe.model.path is not None:
        return loaded.path.parent / recipe.model.path
    if recipe.model.id is None or not effective.is_on_hub(recipe):
        return None
    _, role = recipe.roles()[0]
    set_here = {name: value for name, value in effective.env_of(recipe, role).items() if isinstance(value, str)}
    download_dir = effective.args_of(recipe, role).get("download-dir")
    cache = files.hub_cache({**os.environ, **set_here}, download_dir if isinstance(download_dir, str) else None)
    return files.cached_snapshot(cache, recipe.model.id, recipe.model.revision)


def model_files(loaded: LoadedRecipe) -> str | None:
    """Identify the recipe's model by its files here; None: it is not on this machine."""
    folder = model_folder(loaded)
    return None if folder is None else model_identity(folder)


def model_config(loaded: LoadedRecipe, *, online: bool = False) -> dict[str, Any] | None:
    """Return the config.json of the model, where it is on this machine; `online`: else, of an id, from the hub.

    A folder without config.json is the preflight's to refuse: it looks on the node. Raises PreflightError if the hub
    has none.
    """
    folder, model = model_folder(loaded), loaded.recipe.model
    if folder is not None:
        return files.config_in(folder)
    if not online or not effective.is_on_hub(loaded.recipe):
        return None
    return files.fetch_config(model.id or "", model.revision, os.environ)


@contextmanager
def errors_with_lines(loaded: LoadedRecipe, cluster: LoadedCluster | None = None) -> Iterator[None]:
    """Give errors their place as file:line. Errors of the pure rooms name a key of the recipe, or of the cluster file,
    whose sections win over the recipe's."""
    try:
        yield
    except PdserveError as error:
        if error.where is not None and _KEY.fullmatch(error.where):
            error.what = f"{error.where}: {error.what}"
            there = None if cluster is None else cluster.locate(error.where)
            error.where = there or loaded.locate(error.where)
        raise


def recipe_words(recipe: Path, set_: Sequence[str], unset: Sequence[str]) -> list[str]:
    """Return the recipe and its overrides as `pdserve up` takes them."""
    options = [*(("--set", text) for text in set_), *(("--unset", text) for text in unset)]
    return [str(recipe), *(word for option in options for word in option)]


def batch_script(planned: PlannedRecipe, words: Sequence[str], *, command: Sequence[str] = ()) -> str:
    """Return the script that sbatch takes, on its stdin too; errors name the recipe's lines. `command`: of `pdserve
    run`."""
    with errors_with_lines(planned.loaded):
        return render_sbatch(planned.loaded.recipe, planned.plan, words, command=command)


def check_job(planned: PlannedRecipe) -> None:
    """Check that a job of this recipe is not stopped when it starts. Raises RecipeError."""
    with errors_with_lines(planned.loaded):
        check_job_time(planned.loaded.recipe, signal_seconds(planned.plan))
