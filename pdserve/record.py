"""What is written down before anything starts: recipe, plan, versions, revision, host."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

from pdserve import __version__
from pdserve.plan.model import Plan, Versions
from pdserve.process import output_of
from pdserve.rundir import RunDir

_GIT_SECONDS = 5.0


def record_run(run: RunDir, plan: Plan, recipe_yaml: str, versions: Versions) -> None:
    """Saves the resolved recipe (secrets by name only), the plan and what it was made with."""
    run.write(run.recipe, recipe_yaml)
    run.write(run.plan, plan.model_dump_json(indent=2))
    facts = {
        "pdserve": __version__,
        "git_revision": git_revision(Path(__file__).parent),
        "python": sys.version.split()[0],
        "kernel": platform.release(),
        "host": platform.node(),
        **versions.model_dump(),
    }
    run.write(run.versions, json.dumps(facts, indent=2))


def git_revision(folder: Path) -> str | None:
    """The commit that this code is, with `-dirty` if it was changed; None outside a checkout."""
    said = output_of(["git", "describe", "--always", "--dirty", "--abbrev=12"], timeout=_GIT_SECONDS, cwd=folder)
    return said.out.strip() if said.code == 0 else None
