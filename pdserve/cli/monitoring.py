"""`pdserve monitoring`"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import typer

from pdserve.errors import RecipeError, StateError
from pdserve.monitoring.dashboard import dashboard_json
from pdserve.monitoring.prometheus import (
    ALERTS_FILE,
    DASHBOARD_FILE,
    PROMETHEUS_FILE,
    alerts_yml,
    parts_of,
    prometheus_yml,
    scrape,
)
from pdserve.operations.plan_recipe import load, plan_for
from pdserve.plan.model import Plan
from pdserve.run.directory import find, home


def run(
    recipe: Path | None,
    set_: Sequence[str],
    unset: Sequence[str],
    *,
    deployment: str | None,
    node: str | None,
    out: Path,
    force: bool,
) -> None:
    """Write the files of Prometheus, its alerts and the dashboard."""
    if recipe is None and (set_ or unset):
        raise typer.BadParameter("--set and --unset change a recipe: give one")
    if recipe is not None and deployment is not None:
        raise typer.BadParameter("a recipe and --deployment are two sources of a plan: give one of them")
    plan = find(home(os.environ), deployment).read_plan() if recipe is None else _plan_here(recipe, set_, unset)
    asked = scrape(plan, _node(plan, node))
    parts = parts_of(plan)
    files = {
        PROMETHEUS_FILE: prometheus_yml(plan, asked),
        ALERTS_FILE: alerts_yml(parts),
        DASHBOARD_FILE: dashboard_json(parts),
    }
    _write(out, files, force=force)
    for target in asked.unreachable:
        typer.echo(
            f"warning: {target.process} on {target.node} listens on the loopback of its node and is left out; a "
            f"Prometheus there can read it: pdserve monitoring --deployment {plan.name} --node {target.node} --out DIR",
            err=True,
        )
    typer.echo(f"{len(asked.targets)} targets for a Prometheus on {asked.node}: {out / PROMETHEUS_FILE}")
    typer.echo(f"alerts: {out / ALERTS_FILE}; dashboard, to be imported into Grafana: {out / DASHBOARD_FILE}")


def _plan_here(recipe: Path, set_: Sequence[str], unset: Sequence[str]) -> Plan:
    """Return the plan for this machine: addresses of other nodes are not known before `up` has looked at them."""
    planned = plan_for(load(recipe, set_, unset), None, run_dir="RUN_DIR", run_id="RUN_ID")
    nodes = len(planned.plan.nodes)
    if nodes > 1:
        raise StateError(
            f"the recipe takes {nodes} nodes, whose addresses are known only when it runs",
            where=str(recipe),
            todo=f"pdserve up {recipe}, then pdserve monitoring --deployment {planned.plan.name} --out DIR",
        )
    return planned.plan


def _node(plan: Plan, node: str | None) -> str:
    """Return where Prometheus runs: beside the proxy, unless another node was named."""
    names = [known.name for known in plan.nodes]
    if node is None:
        return plan.process("proxy").node
    if node not in names:
        raise StateError(
            f"{plan.name} has no node {node!r}", where="--node", todo=f"name one of its nodes: {', '.join(names)}"
        )
    return node


def _write(out: Path, files: Mapping[str, str], *, force: bool) -> None:
    """Write all of the files, or none if one is there with other contents: it may have been edited, or be another
    program's."""
    try:
        different = [name for name, text in files.items() if (out / name).exists() and _text(out / name) != text]
        if different and not force:
            raise StateError(
                f"{', '.join(different)} there has other contents, which would be lost",
                where=str(out),
                cause="it was edited, or is of another deployment or of an earlier plan",
                todo="choose another folder with --out, or add --force to replace it",
            )
        out.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (out / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise RecipeError(
            f"the files cannot be written: {error.strerror}",
            where=str(error.filename or out),
            todo="give --out a folder that you may write",
        ) from error


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")
