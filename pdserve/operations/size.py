"""A recipe and the model's files on this machine to numbers."""

from __future__ import annotations

from pdserve.errors import PreflightError
from pdserve.models import files
from pdserve.models.layers import UnknownModelError
from pdserve.operations.plan_recipe import Planned, located, model_folder, plan_for
from pdserve.recipe.load.loader import LoadedRecipe
from pdserve.sizing.given import Given
from pdserve.sizing.whole import Sizing, size_recipe


def size(loaded: LoadedRecipe, given: Given) -> tuple[Sizing, Planned]:
    """Raises RecipeError, and PreflightError where the model is not here or not known."""
    planned = plan_for(loaded, None, run_dir="RUN_DIR", run_id="RUN_ID")
    model = loaded.recipe.model
    revision = "" if model.revision is None else f" --revision {model.revision}"
    with located(loaded):
        folder = model_folder(loaded)
        if folder is None:
            raise PreflightError(
                f"nothing is known of the model {model.id}: it is not in the hub's cache on this machine",
                where="model.id",
                cause="it was never fetched here, or HF_HOME, HF_HUB_CACHE or --download-dir name another cache",
                todo=f"its config.json is enough for KV: hf download {model.id} config.json{revision}",
            )
        model_files = files.read(folder)
        try:
            sizing = size_recipe(
                loaded.recipe, planned.plan, model_files.config, model_files.tensors, model_files.file_bytes, given
            )
        except UnknownModelError as error:
            raise PreflightError(
                f"the KV of this model cannot be computed: {error}",
                where="model",
                cause=f"{folder / 'config.json'} describes an architecture that is not in the list of docs/plan.md",
                todo="start one instance of it, and read 'KV cache size' and 'Maximum concurrency' in its log",
            ) from error
    return sizing, planned
