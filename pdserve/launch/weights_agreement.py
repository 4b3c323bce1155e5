"""Which commit of the model each node has fetched: they must be the same one."""

from __future__ import annotations

import asyncio
import json

from pdserve.errors import StartError
from pdserve.plan.model import Plan, Process
from pdserve.plan.weights import RECORDS
from pdserve.run.directory import RunDir

_LOOK_SECONDS = 0.5
_PATIENCE_SECONDS = 60.0
"""A network file system may show a file of another node so much later."""


async def same_commit(plan: Plan, run: RunDir) -> str | None:
    """The commit of all nodes; None where nothing is fetched. Raises StartError when they differ."""
    fetchers = [process for process in plan.processes if process.fetches_weights]
    commits = {process.name: await _commit(run, process) for process in fetchers}
    first = next(iter(commits.values()), None)
    if all(commit == first for commit in commits.values()):
        return first
    raise StartError(
        f"the nodes have different commits of {plan.model} at {plan.revision or 'main'}",
        where="model.revision",
        cause="it moved while they looked it up, or a node without the hub has an older one in its cache",
        todo=f"set model.revision to one of these commits, e.g. {first}",
        evidence=tuple(f"{process.name}@{process.node}: {commits[process.name]}" for process in fetchers),
    )


async def _commit(run: RunDir, process: Process) -> str:
    file = run.path / RECORDS / f"{process.name}.json"
    for _ in range(int(_PATIENCE_SECONDS / _LOOK_SECONDS)):
        if file.parent.is_dir() and file in list(file.parent.iterdir()):  # opening a folder shows what is new in it
            return str(json.loads(file.read_text(encoding="utf-8"))["commit"])
        await asyncio.sleep(_LOOK_SECONDS)
    raise StartError(
        "it has ended well, but left no record of the commit that it fetched",
        where=f"{process.name}@{process.node}",
        cause="the run directory is not the same folder on that node",
        todo=f"look for {file} there, and set PDSERVE_HOME to a folder that all nodes share",
    )
