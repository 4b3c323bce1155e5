"""`pdserve init`"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import typer

from pdserve.operations.import_recipe import save
from pdserve.operations.init_recipe import first_recipe
from pdserve.starter.goal import Goal
from pdserve.starter.hardware import HARDWARE


def run(model: str | None, hardware: str | None, nodes: int, devices: int | None, goal: Goal, out: Path | None) -> None:
    """Prints the recipe, or writes it to `out`; what the planner objects to goes to stderr. Raises RecipeError."""
    model = _asked(model, "--model", "a folder, or an id of the hub as Qwen/Qwen3-8B")
    hardware = _asked(hardware, "--hardware", ", ".join(HARDWARE))
    made = first_recipe(model, hardware, nodes=nodes, devices=devices, goal=goal)
    if out is None:
        typer.echo(made.text, nl=False)
    else:
        save(made.text, out)
    for warning in made.warnings:
        typer.echo(f"warning: {warning}", err=True)
    for crossing in made.crossings:
        typer.echo(f"{crossing.severity}: {crossing.where}: {crossing.what}", err=True)
        typer.echo(f"  what to do: {crossing.todo}", err=True)
    if not made.checked:
        typer.echo(
            f"warning: nothing was checked against the memory of {hardware}: config.json and weights of {model} are "
            "not on this machine, or not of a kind that the planner knows",
            err=True,
        )
    if out is not None:
        there = shlex.quote(str(out))
        typer.echo(
            f"{out} is written; next: pdserve plan {there}, pdserve preflight {there}, pdserve up {there}", err=True
        )


def _asked(value: str | None, option: str, choices: str) -> str:
    """The option, or the answer at a terminal."""
    if value is not None:
        return value
    if not sys.stdin.isatty():
        raise typer.BadParameter(f"{option} is missing: give {choices}")
    return str(typer.prompt(f"{option.lstrip('-')} ({choices})", err=True))
