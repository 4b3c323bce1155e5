"""The stage before the first look at the nodes: the image of a recipe's container."""

from __future__ import annotations

import asyncio
import os

from pdserve.operations.plan_recipe import located
from pdserve.preflight.nodes.container_stage import Report
from pdserve.preflight.nodes.images import provide_images
from pdserve.reach.candidates import Candidates
from pdserve.recipe.load.loader import LoadedRecipe
from pdserve.recipe.model import Recipe
from pdserve.run.directory import RunDir, home

_FOLDER = ".images"
"""No deployment has such a name."""


def image_store(recipe: Recipe) -> str:
    """Where the files are that apptainer and pyxis make of images."""
    named = None if recipe.container is None else recipe.container.store
    return named or str(home(os.environ) / _FOLDER)


def provide(loaded: LoadedRecipe, machines: Candidates, run: RunDir, report: Report) -> None:
    """Nothing without a container. Raises PreflightError with every node that cannot have the image."""
    recipe = loaded.recipe
    if recipe.container is None:
        return
    with located(loaded):
        asyncio.run(
            provide_images(machines.machines, recipe, run_dir=run.path, store=image_store(recipe), report=report)
        )
