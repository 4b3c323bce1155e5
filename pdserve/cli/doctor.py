"""`pdserve doctor`"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from pdserve.doctor.bundle import contents, make_member, members, write
from pdserve.doctor.read_run import find_run, known_secrets, read_logs, read_run, unset_secrets
from pdserve.doctor.records import Diagnosis, RunRecords
from pdserve.doctor.rules import diagnose
from pdserve.printable import printable
from pdserve.run.directory import home

CAUSE_SEEN = 10
"""The exit code where there is a cause; the causes themselves are the output."""


def run(target: str | None, *, as_json: bool, bundle: Path | None, logs: bool = False) -> None:
    """Print what is seen, and write the bundle. Exit 0 where no cause is seen, CAUSE_SEEN where there is one. Raises
    BadParameter."""
    if logs and bundle is None:
        raise typer.BadParameter("--logs adds the logs to an archive: give --bundle FILE too")
    run_dir = find_run(target, home(os.environ))
    records = read_run(run_dir)
    diagnoses = diagnose(records, read_logs(run_dir, records))
    document = json.dumps(_document(records, diagnoses), indent=2)
    if as_json:
        typer.echo(document)
    else:
        _show(records, diagnoses)
    if bundle is not None:
        secrets = known_secrets(run_dir, records, os.environ)
        files = [make_member("doctor.json", document, secrets), *members(run_dir, secrets, logs=logs)]
        # To stderr: stdout may be a JSON document.
        for name in unset_secrets(records, os.environ):
            typer.echo(
                f"warning: {name} is not set here: its value cannot be recognised, and is removed only "
                f"where its name or its form shows it; export {name} as for `up`, and run this command again",
                err=True,
            )
        typer.echo(f"\n{bundle} will hold:\n{printable(contents(files))}", err=True)
        write(bundle, run_dir.run_id, files)
        typer.echo(
            f"{bundle} is written; read it before you send it: it names hosts and paths, and "
            + ("engines log prompts" if logs else "has no logs (--logs adds them)"),
            err=True,
        )
    if diagnoses:
        raise typer.Exit(CAUSE_SEEN)


def _document(records: RunRecords, diagnoses: list[Diagnosis]) -> dict[str, object]:
    """Return the diagnosis as data: stable keys, no secrets of ours."""
    return {
        "run": records.run_dir,
        "name": None if records.plan is None else records.plan.name,
        "phase": records.phase,
        "alive": records.alive,
        "versions": records.versions.model_dump(exclude={"same_code"}),
        "events": len(records.events),
        "unread": list(records.unread),
        "warned_before_the_start": [] if records.plan is None else list(records.plan.warnings),
        "diagnoses": [diagnosis.to_json() for diagnosis in diagnoses],
    }


def _show(records: RunRecords, diagnoses: list[Diagnosis]) -> None:
    console = Console(soft_wrap=True, highlight=False) if sys.stdout.isatty() else None
    for line, style in _lines(records, diagnoses):
        if console is None:
            typer.echo(printable(line))
        else:
            console.print(Text(printable(line), style=style))


def _lines(records: RunRecords, diagnoses: list[Diagnosis]) -> Iterator[tuple[str, str]]:
    """Yield the lines of a diagnosis, each with its style."""
    name = records.plan.name if records.plan is not None else "run"
    yield f"{name}: {records.phase or 'nothing was started'}; record: {records.run_dir}", ""
    if not diagnoses:
        read = f"{len(records.events)} events, the logs" + (" and the live figures" if records.alive else "")
        yield f"no known cause of a failure or of slowness is in {read}", "green"
    for number, each in enumerate(diagnoses, start=1):
        where = f" in {', '.join(each.processes)}" if each.processes else ""
        yield "", ""
        yield f"{number}. {each.rule}{where}{f' ({each.times} times)' if each.times > 1 else ''}", "bold red"
        yield f"   cause:    {each.cause}", ""
        yield from ((f"   evidence: {evidence.line()}", "dim") for evidence in each.evidence)
        yield f"   fix:      {each.todo}", ""
        if each.setting:
            yield f"   recipe:   --set {each.setting}", "cyan"
    if diagnoses and records.plan is not None and records.plan.warnings:
        yield "", ""
        yield from ((f"warned before the start: {warning}", "yellow") for warning in records.plan.warnings)
