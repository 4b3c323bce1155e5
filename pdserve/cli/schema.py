"""`pdserve schema`"""

from __future__ import annotations

import json
from typing import Any

import typer

from pdserve.reach.cluster_file import Cluster
from pdserve.recipe.schema import json_schema, json_schema_of


def run(*, cluster: bool) -> None:
    """Prints the JSON Schema that schema/recipe.schema.json or schema/cluster.schema.json must equal."""
    typer.echo(json.dumps(cluster_schema() if cluster else json_schema(), indent=2))


def cluster_schema() -> dict[str, Any]:
    """The schema of cluster files as data."""
    return json_schema_of(Cluster, "pdserve cluster file", "The machines of a deployment, schema 1.")
