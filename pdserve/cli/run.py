"""`pdserve run`"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import typer

from pdserve.cli.console import Console
from pdserve.cli.options import OWN_CODES_OF_RUN, check_place_options
from pdserve.errors import CommandError, PdserveError, ReportedError
from pdserve.operations.client_command import ClientCommand
from pdserve.operations.plan_recipe import load, recipe_words
from pdserve.operations.up import UpOptions, up
from pdserve.operations.where import where


def run(
    recipe: Path,
    argv: Sequence[str],
    set_: Sequence[str],
    unset: Sequence[str],
    *,
    cluster: Path | None,
    this_machine: bool,
) -> None:
    """Raises typer.Exit with the command's code, CommandError, KeyboardInterrupt for a stop that was asked for, and
    other errors of pdserve with codes that are apart from those of commands."""
    check_place_options(cluster, this_machine=this_machine)
    try:
        command = ClientCommand(argv, os.environ)
        loaded = load(recipe, set_, unset)
        words = recipe_words(loaded.path, set_, unset)
        there = where(loaded, cluster, this_machine=this_machine, words=words)
        up(loaded, there, Console(stdout=False), UpOptions(command=command))
        code = command.exit_code()
    except CommandError:
        raise
    except PdserveError as error:
        raise ReportedError(error.render(), OWN_CODES_OF_RUN + error.exit_code) from error
    raise typer.Exit(code)
