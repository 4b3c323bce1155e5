"""`pdserve schema`"""

from __future__ import annotations

import json

import typer

from pdserve.recipe.schema import json_schema


def run() -> None:
    """Prints the JSON Schema that schema/recipe.schema.json must equal."""
    typer.echo(json.dumps(json_schema(), indent=2))
