"""Verbs around a deployment: `patches`, `new-key`, `monitoring`."""

from __future__ import annotations

import contextlib
import json
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdserve.cli.options import JsonOption, NameArgument, SetOption, UnsetOption
from pdserve.cli.output import VerbOutput
from pdserve.errors import NotOursError, RecipeError, StateError

if TYPE_CHECKING:
    from pdserve.patches.patch import Patch
    from pdserve.patches.record import PatchRecord
    from pdserve.plan.model import Plan
    from pdserve.run.directory import RunDir

    Reports = Mapping[str, list[PatchRecord]]

verbs = typer.Typer()
_HERE = {"apply": "applies", "not-needed": "not needed", "unknown": "unknown code"}
_STYLES = {"apply": "green", "not-needed": "dim", "unknown": "bold red"}


@verbs.command()
def patches(name: NameArgument = None, json_: JsonOption = False) -> None:
    """Show every patch of vLLM and LMCache: why, for which versions, whether it applies here, where it is active."""
    from pdserve.installed.distributions import installed
    from pdserve.patches.registry import REGISTRY

    run_dir, reports = _running_reports(name)
    rows = [_patch_row(patch, reports) for patch in REGISTRY]
    if json_:
        document = {"versions": installed(), "run": str(run_dir.path) if run_dir else None, "patches": rows}
        typer.echo(json.dumps(document, indent=2))
        return
    out = VerbOutput()
    for row in rows:
        for line, style in _patch_lines(row):
            out.line(line, style)


def _running_reports(name: str | None) -> tuple[RunDir | None, Reports]:
    """Return the deployment that is meant; without a name and without exactly one there is none to ask."""
    from pdserve.run.directory import find, has_living_launcher, home
    from pdserve.run.patch_proof import records

    try:
        run_dir = find(home(os.environ), name)
        state, plan = run_dir.read_state(), run_dir.read_plan()
    except (StateError, NotOursError):
        if name is not None:
            raise
        return None, {}
    if not has_living_launcher(run_dir, state):
        return None, {}
    return run_dir, {process.name: records(run_dir, process.name) for process in plan.processes if process.patches}


def _patch_row(patch: Patch, reports: Reports) -> dict[str, Any]:
    from pdserve.patches.record import merged_effects
    from pdserve.patches.verdict import judge_here

    verdict = judge_here(patch)
    active = {
        process: sorted(record.process for record in reported if patch.name in record.active)
        for process, reported in reports.items()
        if any(patch.name in record.active for record in reported)
    }
    return {
        "name": patch.name,
        "behaviour": patch.behaviour,
        "why": patch.summary,
        "issue": patch.issue,
        "required": patch.required,
        "vehicle": patch.vehicle,
        "targets": [target.name for target in patch.targets],
        "vllm": patch.vllm or "all",
        "lmcache": patch.lmcache or "any",
        "connectors": sorted(patch.connectors),
        "platforms": list(patch.platforms),
        "settings": sorted(patch.settings),
        "runs_in": list(patch.runs_in),
        "remove_when": patch.remove_when,
        "here": {"outcome": verdict.outcome, "why": verdict.why},
        "active": active,
        "allowed_unknown": sorted(
            process
            for process, reported in reports.items()
            if any(patch.name in record.allowed_unknown for record in reported)
        ),
        "effects": {
            process: effects
            for process, reported in reports.items()
            if (effects := merged_effects(reported).get(patch.name))
        },
    }


def _needed_by(row: Mapping[str, Any]) -> str:
    parts = [f"vllm {row['vllm']}"]
    if row["lmcache"] != "any":
        parts.append(f"lmcache {row['lmcache']}")
    if row["connectors"]:
        parts.append(f"with {' and '.join(row['connectors'])}")
    if len(row["platforms"]) < 3:
        parts.append(f"on {' or '.join(row['platforms'])}")
    if row["settings"]:
        parts.append(f"for the setting {' or '.join(row['settings'])}")
    return ", ".join(parts)


def _active(row: Mapping[str, Any]) -> str:
    return "; ".join(f"{process}: {', '.join(where)}" for process, where in row["active"].items()) or "-"


def _patch_lines(row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the lines of a patch, each with its style."""
    kind = "required" if row["required"] else "optional"
    outcome = row["here"]["outcome"]
    yield f"{row['name']} ({row['behaviour']}, {kind})", "bold"
    for line in textwrap.wrap(row["why"], 110, initial_indent="  why:     ", subsequent_indent="           "):
        yield line, ""
    yield f"  issue:   {row['issue']}", ""
    yield f"  targets: {' '.join(row['targets'])} ({row['vehicle']})", ""
    yield f"  needed:  {_needed_by(row)}", ""
    yield f"  here:    {_HERE[outcome]}: {row['here']['why']}", _STYLES[outcome]
    yield f"  active:  {_active(row)}", ""
    for process, effects in row["effects"].items():
        figures = ", ".join(f"{effect} {value:g}" for effect, value in sorted(effects.items()))
        yield f"  effects: {process}: {figures}", ""


@verbs.command("new-key")
def new_key(
    name: Annotated[str, typer.Argument(help="Whose key it is; shown in logs and metrics.")],
    file: Annotated[
        Path | None, typer.Option("--file", help="Add it to this file of keys (proxy.auth.keys_file).")
    ] = None,
    max_requests: Annotated[int | None, typer.Option("--max-requests", min=1, help="Requests in flight.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option("--requests-per-minute", min=1, help="Requests.")] = None,
    priority: Annotated[int, typer.Option("--priority", help="The best its requests can get; 0 unless given.")] = 0,
) -> None:
    """Make an API key for the proxy: print it, once, and add its hash to the file of keys."""
    from pdserve.pd.limits import keys

    key, line = keys.new_key(
        name,
        max_requests=max_requests,
        requests_per_minute=requests_per_minute,
        priority=priority or None,
    )
    if file is None:
        typer.echo(key)
        typer.echo(line, err=True)
        return
    before = file.read_bytes() if file.exists() else b""
    if before and name in {known.name for known in keys.read(file)}:
        raise RecipeError(f"there is a key of the name {name} already", where=str(file), todo="choose another name")
    _append_key(file, (b"" if before.endswith(b"\n") or not before else b"\n") + line.encode() + b"\n")
    typer.echo(key)


def _append_key(file: Path, text: bytes) -> None:
    """Append to the file, which is made with mode 0600. Raises RecipeError; the file is then as it was."""
    size = file.stat().st_size if file.exists() else 0
    try:
        file.touch(mode=0o600)
        with file.open("ab") as end:
            end.write(text)
    except OSError as error:
        with contextlib.suppress(OSError):  # half a line would make all of it unreadable for the proxy
            os.truncate(file, size)
        raise RecipeError(
            f"the key cannot be saved: {error.strerror}",
            where=str(file),
            todo="name a file in a folder that exists, that you can write and that has room",
        ) from error


@verbs.command()
def monitoring(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the files; made if it is not there.")],
    recipe: Annotated[
        Path | None,
        typer.Argument(
            help="The recipe, if it takes one node; without one, the plan of a deployment.", show_default=False
        ),
    ] = None,
    deployment: Annotated[
        str | None, typer.Option("--deployment", metavar="NAME", help="The deployment, if there are several.")
    ] = None,
    node: Annotated[
        str | None, typer.Option("--node", help="The node that Prometheus runs on; that of the proxy unless given.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that have other contents.")] = False,
    set_: SetOption = None,
    unset: UnsetOption = None,
) -> None:
    """Write prometheus.yml, alerts.yml and Grafana's dashboard.json for a deployment.

    Prometheus gets every /metrics that it reaches from its node: those of the proxy, the engines, and LMCache there.
    """
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
    from pdserve.run.directory import find, home

    if recipe is None and (set_ or unset):
        raise typer.BadParameter("--set and --unset change a recipe: give one")
    if recipe is not None and deployment is not None:
        raise typer.BadParameter("a recipe and --deployment are two sources of a plan: give one of them")
    plan = (
        find(home(os.environ), deployment).read_plan()
        if recipe is None
        else _plan_here(recipe, set_ or [], unset or [])
    )
    asked = scrape(plan, _prometheus_node(plan, node))
    parts = parts_of(plan)
    files = {
        PROMETHEUS_FILE: prometheus_yml(plan, asked),
        ALERTS_FILE: alerts_yml(parts),
        DASHBOARD_FILE: dashboard_json(parts),
    }
    _write_files(out, files, force=force)
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
    from pdserve.operations.plan_recipe import load, plan_for

    planned = plan_for(load(recipe, set_, unset), None, run_dir="RUN_DIR", run_id="RUN_ID")
    nodes = len(planned.plan.nodes)
    if nodes > 1:
        raise StateError(
            f"the recipe takes {nodes} nodes, whose addresses are known only when it runs",
            where=str(recipe),
            todo=f"pdserve up {recipe}, then pdserve monitoring --deployment {planned.plan.name} --out DIR",
        )
    return planned.plan


def _prometheus_node(plan: Plan, node: str | None) -> str:
    """Return where Prometheus runs: beside the proxy, unless another node was named."""
    names = [known.name for known in plan.nodes]
    if node is None:
        return plan.process("proxy").node
    if node not in names:
        raise StateError(
            f"{plan.name} has no node {node!r}", where="--node", todo=f"name one of its nodes: {', '.join(names)}"
        )
    return node


def _write_files(out: Path, files: Mapping[str, str], *, force: bool) -> None:
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
