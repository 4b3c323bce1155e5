"""`pdserve init`: what is known of the model on this machine, a recipe of it, and the proof that it is valid."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pdserve.errors import PdserveError, PreflightError, RecipeError
from pdserve.importing.recipe_text import commented_yaml
from pdserve.models import files
from pdserve.operations.plan_recipe import plan_for
from pdserve.operations.size import size
from pdserve.recipe.load.loader import LoadedRecipe, load_recipe
from pdserve.sizing import Crossing, SizingOptions
from pdserve.starter.draft import HARDWARE, LONGEST, Hardware, InitChoice, draft
from pdserve.starter.goal import Goal

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class FirstRecipe:
    """Holds a recipe that loads and plans; `checked`: with the planner's numbers."""

    text: str
    loaded: LoadedRecipe
    warnings: tuple[str, ...]
    crossings: tuple[Crossing, ...]
    checked: bool


def first_recipe(
    model: str,
    hardware: str,
    *,
    nodes: int,
    devices: int | None,
    goal: Goal,
    environ: Mapping[str, str] = os.environ,
) -> FirstRecipe:
    """Write a first recipe of a model for a kind of hardware, and prove that it is valid. Raises RecipeError for what
    cannot be, PreflightError for a model whose files are broken."""
    wish = _wish(model, _hardware(hardware), nodes, devices, goal, environ)
    made = draft(wish)
    head = [
        f"A first recipe by `pdserve init` for {hardware}: each value has its reason beside it.",
        "Nothing was started. Read it, change it, then: pdserve validate, pdserve plan, pdserve up.",
    ]
    text = commented_yaml(made.document, made.reasons, head, "the recipe")
    with tempfile.TemporaryDirectory() as folder, _errors_without(folder):
        path = Path(folder) / f"{made.document['name']}.yaml"
        path.write_text(text, encoding="utf-8")
        loaded = load_recipe(path, environ=environ)
        planned = plan_for(loaded, None, run_dir="RUN_DIR", run_id="RUN_ID")
        crossings: tuple[Crossing, ...] = ()
        if checked := wish.config is not None and wish.tensors is not None:
            try:
                sizing, _ = size(loaded, SizingOptions(device_gib=wish.hardware.device_gib or None))
                crossings = sizing.crossings
            except PreflightError:  # an architecture that the planner does not know
                checked = False
    if sure := [crossing for crossing in crossings if crossing.severity == "error"]:
        raise RecipeError(
            "the planner is sure that the recipe for this would fail",
            where=f"--model {model}",
            cause="an edge that no choice of instances avoids",
            todo="write the recipe by hand with what the lines below say, and look at it with pdserve plan",
            evidence=tuple(f"{crossing.where}: {crossing.what} -> {crossing.todo}" for crossing in sure),
        )
    warnings = [_relative_text(folder, text) for text in (*loaded.warnings, *planned.plan.warnings)]
    return FirstRecipe(text, loaded, tuple(dict.fromkeys(warnings)), crossings, checked)


def _relative_text(folder: str, text: str) -> str:
    return text.replace(f"{folder}/", "")


@contextmanager
def _errors_without(folder: str) -> Iterator[None]:
    """Take a temporary folder out of errors. The recipe is in no folder yet: a reader would look for one that is
    gone."""
    try:
        yield
    except PdserveError as error:
        error.what = _relative_text(folder, error.what)
        error.where, error.cause, error.todo = (
            None if text is None else _relative_text(folder, text) for text in (error.where, error.cause, error.todo)
        )
        error.evidence = tuple(_relative_text(folder, line) for line in error.evidence)
        raise


def _hardware(name: str) -> Hardware:
    if (hardware := HARDWARE.get(name)) is None:
        raise RecipeError(
            f"the hardware {name} is not known",
            where="--hardware",
            todo=f"choose one of {', '.join(HARDWARE)}; for other GPUs take the closest, then change the recipe",
        )
    return hardware


def _wish(
    model: str, hardware: Hardware, nodes: int, devices: int | None, goal: Goal, environ: Mapping[str, str]
) -> InitChoice:
    if devices is not None and not hardware.devices:
        todo = "leave --gpus-per-node out"
        raise RecipeError(f"{hardware.name} has no GPUs", where="--gpus-per-node", todo=todo)
    path = Path(model).expanduser()
    if path.is_dir():
        folder: Path | None = path.absolute()
        name = path.resolve().name
    elif _HUB_ID.fullmatch(model):
        folder = None
        name = model.rpartition("/")[2]
    else:
        raise RecipeError(
            f"{model}: no such folder, and no id of the hub",
            where="--model",
            cause="a wrong path, or an id without its owner",
            todo="give a folder that is there, or an id as Qwen/Qwen3-8B",
        )
    there = folder if folder is not None else files.cached_snapshot(files.hub_cache(environ), model, None)
    config = None if there is None else files.config_in(there)
    tensors = None if there is None or config is None else files.read_model(there).tensors
    count = hardware.devices if devices is None else devices
    return InitChoice(
        name=name,
        path=None if folder is None else str(folder),
        id=None if folder is not None else model,
        hardware=hardware,
        nodes=nodes,
        devices=count,
        goal=goal,
        longest=LONGEST[goal],
        config=config,
        tensors=tensors,
    )
