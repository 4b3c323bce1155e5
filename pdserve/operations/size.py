"""Compute numbers of a recipe, by what is known of its model."""

from __future__ import annotations

import os
from pathlib import Path

from pdserve.bench.result import MODEL_FILES
from pdserve.errors import PreflightError, RecipeError
from pdserve.models import files
from pdserve.models.config_json import UnknownModelError
from pdserve.operations.plan_recipe import PlannedRecipe, errors_with_lines, model_files, model_folder, plan_for
from pdserve.preflight.finding import Finding, judge_crossings
from pdserve.recipe import effective
from pdserve.recipe.load.loader import LoadedRecipe, load_recipe
from pdserve.sizing import Sizing, SizingOptions, size_recipe, sizing_rows

_BOUNDS = ("weights of", "memory for KV", "blocks of", "requests of", "tokens", "KV of a token and rank")


def size(loaded: LoadedRecipe, given: SizingOptions, *, online: bool = False) -> tuple[Sizing, PlannedRecipe]:
    """Compute what a recipe takes and holds. `online`: a model that is not here is asked for at the hub, without its
    weights. Raises RecipeError, and PreflightError where the model is not to be had or not known."""
    planned = plan_for(loaded, None, run_dir="RUN_DIR", run_id="RUN_ID", online=online)
    with errors_with_lines(loaded):
        return _size_plan(planned, given), planned


def find_crossings(planned: PlannedRecipe) -> list[Finding]:
    """Return the edges that a plan crosses by what recipe and model state. What cannot be computed is no finding."""
    try:
        return judge_crossings(planned.plan, _size_plan(planned, SizingOptions()).crossings)
    except (PreflightError, RecipeError):
        return []


def planned_numbers(recipe: Path) -> dict[str, str]:
    """Return which model a recipe has, and the numbers of `pdserve plan` that bound a load, as lines. What cannot be
    computed here is missing."""
    known: dict[str, str] = {}
    try:
        loaded = load_recipe(recipe, environ=os.environ)
        if (files_here := model_files(loaded)) is not None:
            known[MODEL_FILES] = files_here
        sizing, _ = size(loaded, SizingOptions())
    except (PreflightError, RecipeError):
        return known
    return known | {f"{of}: {label}": value for of, label, value in sizing_rows(sizing) if label.startswith(_BOUNDS)}


def _size_plan(planned: PlannedRecipe, given: SizingOptions) -> Sizing:
    loaded, recipe, plan = planned.loaded, planned.loaded.recipe, planned.plan
    folder = model_folder(loaded)
    try:
        if folder is not None:
            load_format = effective.args_of(recipe, recipe.roles()[0][1]).get("load-format")
            model = files.read_model(folder, load_format=load_format if isinstance(load_format, str) else "auto")
            sizing = size_recipe(recipe, plan, model.config, model.tensors, model.file_bytes, given)
            return sizing.model_copy(update={"lacking": model.lacks})
        if planned.model_config is None:
            raise _not_here(loaded)
        return size_recipe(recipe, plan, planned.model_config, None, 0, given)
    except UnknownModelError as error:
        raise PreflightError(
            f"the KV of this model cannot be computed: {error}",
            where="model",
            cause="its config.json describes an architecture that is not in the list of docs/plan.md",
            todo="start one instance of it, and read 'KV cache size' and 'Maximum concurrency' in its log",
        ) from error


def _not_here(loaded: LoadedRecipe) -> PreflightError:
    model = loaded.recipe.model
    revision = "" if model.revision is None else f" --revision {model.revision}"
    return PreflightError(
        f"nothing is known of the model {model.id}: it is not in the hub's cache on this machine",
        where="model.id",
        cause="it was never fetched here, or HF_HOME, HF_HUB_CACHE or download-dir name another cache",
        todo=f"add --online; or fetch what is enough for KV: hf download {model.id} config.json{revision}",
    )
