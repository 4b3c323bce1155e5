"""Which commit of each model the nodes have fetched: they must have the same."""

from __future__ import annotations

import asyncio
import json
from typing import TypedDict

from pdserve.errors import StartError
from pdserve.plan.model import Plan
from pdserve.plan.process import Process
from pdserve.plan.weights import RECORDS
from pdserve.recipe.hub_models import SPECULATIVE
from pdserve.run.directory import RunDir


class Record(TypedDict):
    """What a download leaves in the run directory."""

    model: str
    revision: str
    commit: str


_LOOK_SECONDS = 0.5
_PATIENCE_SECONDS = 60.0
"""A network file system may show a file of another node so much later."""


async def same_commit(plan: Plan, run: RunDir) -> str | None:
    """The commit of the model on all nodes; None where it is not fetched. Raises StartError when nodes differ in it, or
    in the model that writes drafts."""
    fetched = [(process, await _record(run, process)) for process in plan.processes if process.fetches_weights]
    own: str | None = None
    for model, revision in dict.fromkeys((record["model"], record["revision"]) for _, record in fetched):
        of_model = [
            (process, r["commit"]) for process, r in fetched if (r["model"], r["revision"]) == (model, revision)
        ]
        (_, first), *_ = of_model
        is_own = (model, revision) == (plan.model, plan.revision or "main")
        if any(commit != first for _, commit in of_model):
            key = "model.revision" if is_own else f"`revision` in {SPECULATIVE}"
            raise StartError(
                f"the nodes have different commits of {model} at {revision}",
                where="model.revision" if is_own else None,
                cause="it moved while they looked it up, or a node without the hub has an older one in its cache",
                todo=f"set {key} to one of these commits, e.g. {first}",
                evidence=tuple(f"{process.name}@{process.node}: {commit}" for process, commit in of_model),
            )
        own = first if is_own else own
    return own


async def _record(run: RunDir, process: Process) -> Record:
    file = run.path / RECORDS / f"{process.name}.json"
    for _ in range(int(_PATIENCE_SECONDS / _LOOK_SECONDS)):
        if file.parent.is_dir() and file in list(file.parent.iterdir()):  # opening a folder shows what is new in it
            record: Record = json.loads(file.read_text(encoding="utf-8"))
            return record
        await asyncio.sleep(_LOOK_SECONDS)
    raise StartError(
        "it has ended well, but left no record of the commit that it fetched",
        where=f"{process.name}@{process.node}",
        cause="the run directory is not the same folder on that node",
        todo=f"look for {file} there, and set PDSERVE_HOME to a folder that all nodes share",
    )
