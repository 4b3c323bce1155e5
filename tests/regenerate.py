"""Writes every generated file of the repository anew: python -m tests.regenerate. The diff is for you to read.

Not pdserve/patches/fingerprints.json: that takes the sources of every release (python -m tests.upstream.fingerprints).
"""

from __future__ import annotations

import json
from pathlib import Path

import tests.docs.references
import tests.plan.regenerate
from pdserve.cli.recipe import cluster_schema
from pdserve.recipe.schema import schema_text
from tests.sweep import array_golden

SCHEMAS = Path(__file__).parents[1] / "schema"


def main() -> None:
    """The JSON Schemas, the generated pages of docs/, tests/golden, slurm/disagg.sh and
    tests/sweep/array.sbatch."""
    (SCHEMAS / "recipe.schema.json").write_text(schema_text())
    (SCHEMAS / "cluster.schema.json").write_text(json.dumps(cluster_schema(), indent=2) + "\n")
    tests.docs.references.main()
    tests.plan.regenerate.main()
    array_golden.FILE.write_text(array_golden.array_script())


if __name__ == "__main__":
    main()
