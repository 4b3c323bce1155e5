"""A recipe and what is known of its model to numbers."""

from __future__ import annotations

from pdserve.errors import PreflightError, RecipeError
from pdserve.models import files
from pdserve.models.layers import UnknownModelError
from pdserve.operations.plan_recipe import Planned, located, model_config, model_folder, plan_for
from pdserve.preflight.finding import Finding
from pdserve.preflight.sizes import of_crossings
from pdserve.recipe.load.loader import LoadedRecipe
from pdserve.sizing.given import Given
from pdserve.sizing.whole import Sizing, size_recipe


def size(loaded: LoadedRecipe, given: Given, *, online: bool = False) -> tuple[Sizing, Planned]:
    """`online`: a model that is not here is asked for at the hub, without its weights. Raises RecipeError, and
    PreflightError where the model is not to be had or not known."""
    planned = plan_for(loaded, None, run_dir="RUN_DIR", run_id="RUN_ID", online=online)
    with located(loaded):
        return _sized(planned, given, online=online), planned


def find_crossings(planned: Planned) -> list[Finding]:
    """The edges that a plan crosses by what recipe and model state. What cannot be computed is no finding."""
    try:
        return of_crossings(planned.plan, _sized(planned, Given(), online=False).crossings)
    except (PreflightError, RecipeError):
        return []


def _sized(planned: Planned, given: Given, *, online: bool) -> Sizing:
    loaded, plan = planned.loaded, planned.plan
    folder = model_folder(loaded)
    try:
        if folder is not None:
            model = files.read(folder)
            return size_recipe(loaded.recipe, plan, model.config, model.tensors, model.file_bytes, given)
        config = model_config(loaded, online=online)
        if config is None:
            raise _not_here(loaded)
        return size_recipe(loaded.recipe, plan, config, None, 0, given)
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
