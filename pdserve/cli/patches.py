"""`pdserve patches`"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdserve.errors import NotOursError, StateError
from pdserve.installed.distributions import installed
from pdserve.patches.patch import Patch
from pdserve.patches.record import PatchRecord, merged_effects
from pdserve.patches.registry import REGISTRY
from pdserve.patches.verdict import judge_here
from pdserve.run.directory import RunDir, find, has_living_launcher, home
from pdserve.run.patch_proof import records

_HERE = {"apply": "applies", "not-needed": "not needed", "unknown": "unknown code"}
_STYLES = {"apply": "green", "not-needed": "dim", "unknown": "bold red"}
Reports = Mapping[str, list[PatchRecord]]


def run(name: str | None, *, as_json: bool) -> None:
    """Show every patch: what it is about, whether the code of this environment gets it, and where it is active."""
    run_dir, reports = _running_reports(name)
    rows = [_row(patch, reports) for patch in REGISTRY]
    if as_json:
        document = {"versions": installed(), "run": str(run_dir.path) if run_dir else None, "patches": rows}
        typer.echo(json.dumps(document, indent=2))
    elif sys.stdout.isatty():
        _table(rows)
    else:
        for row in rows:
            typer.echo("\n".join(_lines(row)))


def _running_reports(name: str | None) -> tuple[RunDir | None, Reports]:
    """Return the deployment that is meant; without a name and without exactly one there is none to ask."""
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


def _row(patch: Patch, reports: Reports) -> dict[str, Any]:
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


def _lines(row: Mapping[str, Any]) -> Iterator[str]:
    kind = "required" if row["required"] else "optional"
    yield f"{row['name']} ({row['behaviour']}, {kind})"
    yield from textwrap.wrap(row["why"], 110, initial_indent="  why:     ", subsequent_indent="           ")
    yield f"  issue:   {row['issue']}"
    yield f"  targets: {' '.join(row['targets'])} ({row['vehicle']})"
    yield f"  needed:  {_needed_by(row)}"
    yield f"  here:    {_HERE[row['here']['outcome']]}: {row['here']['why']}"
    yield f"  active:  {_active(row)}"
    for process, effects in row["effects"].items():
        yield f"  effects: {process}: {', '.join(f'{effect} {value:g}' for effect, value in sorted(effects.items()))}"


def _table(rows: list[dict[str, Any]]) -> None:
    table = Table("patch", "why", "needed", "here", "active", header_style="bold", show_lines=True)
    for row in rows:
        here = row["here"]
        table.add_row(
            Text(row["name"]),
            Text(row["why"]),
            Text(_needed_by(row)),
            Text(f"{_HERE[here['outcome']]}: {here['why']}", style=_STYLES[here["outcome"]]),
            Text(_active(row)),
        )
    Console().print(table)
