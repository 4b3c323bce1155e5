"""`pdserve verify`"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdserve.errors import StateError
from pdserve.observe.remote_http import client, seen_from_here
from pdserve.plan.model import Plan
from pdserve.run.directory import RunDir, find, home, lives
from pdserve.run.state import DeploymentState
from pdserve.system.host import is_here, is_named_here
from pdserve.verify import Report, run_proofs

_STYLES = {"proven": "green", "failed": "bold red", "not-proven": "yellow"}


def run(name: str | None, *, as_json: bool) -> None:
    """Prints every proof with its numbers. Raises VerifyError or NotProvenError after that."""
    run_dir = find(home(os.environ), name)
    state, plan = run_dir.read_state(), run_dir.read_plan()
    if not lives(run_dir, state) or state.phase not in ("ready", "degraded"):
        raise StateError(f"{state.name} is not serving ({state.phase})", todo="pdserve up, or pdserve status")
    report = asyncio.run(_prove(run_dir, state, plan))
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
    elif sys.stdout.isatty():
        _table(report)
    else:
        _plain(report)
    report.raise_for_status()


async def _prove(run_dir: RunDir, state: DeploymentState, plan: Plan) -> Report:
    if not (is_here(state.host, state.place) or is_named_here(state.host)):
        raise StateError(
            f"{state.name} is proven from {state.host}, where its key is",
            todo=f"run it there: srun --overlap --jobid=JOB --nodelist={state.host} pdserve verify, or by ssh",
        )
    async with client(run_dir, state) as everywhere:
        return await run_proofs(seen_from_here(plan, state), engine_key=run_dir.read_key(), client=everywhere)


def _numbers(numbers: Mapping[str, object]) -> str:
    return " ".join(f"{key}={value}" for key, value in numbers.items())


def _table(report: Report) -> None:
    table = Table("proof", "status", "claim", "numbers", header_style="bold")
    for proof in report.proofs:
        text = proof.claim if not proof.reason else f"{proof.claim}\n{proof.reason}"
        table.add_row(proof.name, Text(proof.status, style=_STYLES[proof.status]), text, _numbers(proof.numbers))
    Console().print(table)


def _plain(report: Report) -> None:
    for proof in report.proofs:
        typer.echo(f"{proof.status:<10} {proof.name}: {proof.claim}")
        if proof.reason:
            typer.echo(f"           reason: {proof.reason}")
        typer.echo(f"           {_numbers(proof.numbers)}")
