"""Verbs that look at what runs or has run: `logs`, `list`, `doctor`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.cli.options import JsonOption
from pdserve.cli.output import VerbOutput
from pdserve.errors import NotOursError, StateError
from pdserve.printable import printable, size_text

if TYPE_CHECKING:
    from pdserve.doctor.records import Diagnosis, RunRecords
    from pdserve.run.directory import RunDir
    from pdserve.run.retention import RemovedRun

verbs = typer.Typer()
_POLL_SECONDS = 0.2
_TAIL_BYTES_A_LINE = 400
CAUSE_SEEN = 10
"""The exit code of `doctor` where there is a cause; the causes themselves are the output."""


@verbs.command()
def logs(
    process: Annotated[str | None, typer.Argument(help="A process (prefill-0); all of them without it.")] = None,
    name: Annotated[str | None, typer.Option("--deployment", help="The deployment, if there are several.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as the logs grow.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Last lines of each log.")] = 80,
) -> None:
    """Print the logs of a deployment, or of one process of it."""
    from pdserve.run.directory import find, home

    run_dir = find(home(os.environ), name)
    files = _files(run_dir, process)
    if process is not None and not files:
        known = ", ".join(_files(run_dir, None).values())
        raise StateError(f"no log of {process!r}", where=str(run_dir.logs), todo=f"one of: {known}")
    # One that is asked for needs no name before its lines; of those that are followed there may soon be two.
    prefix = len(files) > 1 or (follow and process is None)
    offsets = {file: _print_tail(label if prefix else "", file, lines) for file, label in files.items()}
    while follow:
        for file, label in _files(run_dir, process).items():
            offsets[file] = _print_from(label if prefix else "", file, offsets.get(file, 0))
        sys.stdout.flush()
        time.sleep(_POLL_SECONDS)


def _files(run_dir: RunDir, process: str | None) -> dict[Path, str]:
    """Return the logs and their labels: the process, with its node where several nodes have one of that name
    (agents)."""
    files = sorted(run_dir.logs.glob("*.log"))
    names = [file.stem.partition("@")[0] for file in files]
    labels = {file: name if names.count(name) == 1 else file.stem for file, name in zip(files, names, strict=True)}
    return {file: label for file, label in labels.items() if process in (None, label, label.partition("@")[0])}


def _print_tail(label: str, file: Path, lines: int) -> int:
    from pdserve.logs.lines import read_from
    from pdserve.logs.rotation import rotated_log

    size = file.stat().st_size
    wanted = lines * _TAIL_BYTES_A_LINE
    data = read_from(file, max(0, size - wanted), size) or b""
    if len(data) < wanted and (before := rotated_log(file)).exists():  # it was cut a short while ago
        data = (read_from(before, max(0, before.stat().st_size - wanted + len(data))) or b"") + data
    tail = data.splitlines()
    for line in tail[len(tail) - min(lines, len(tail)) :]:
        _print(label, line)
    return size


def _print_from(label: str, file: Path, offset: int) -> int:
    from pdserve.logs.lines import read_from
    from pdserve.logs.rotation import rotated_log

    data = read_from(file, offset)
    if data is None:
        for line in (read_from(rotated_log(file), offset) or b"").splitlines():
            _print(label, line)
        offset, data = 0, read_from(file, 0) or b""
    whole = data[: data.rfind(b"\n") + 1]
    for line in whole.splitlines():
        _print(label, line)
    return offset + len(whole)


def _print(label: str, line: bytes) -> None:
    text = printable(line.decode(errors="replace"))
    print(f"{label:<12} | {text}" if label else text)


@verbs.command("list")
def list_(
    json_: JsonOption = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove old runs instead, by the recipe's `retention`, and list them.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --prune: only list them.")] = False,
) -> None:
    """List deployments of this user on this machine. With --prune: without their old runs."""
    if dry_run and not prune:
        raise typer.BadParameter("--dry-run belongs to --prune")
    if prune:
        _prune(as_json=json_, dry_run=dry_run)
        return
    from pdserve.run.directory import deployments, home

    rows = []
    for run_dir in deployments(home(os.environ)):
        rows.append({"name": run_dir.path.parent.name, **_phase_now(run_dir), "run": str(run_dir.path)})
    if json_:
        typer.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        typer.echo(printable(f"{row['name']:<24} {row['phase']:<12} {row['endpoint'] or '-':<28} {row['run']}"))
    if not rows:
        typer.echo("no deployments")


def _phase_now(run_dir: RunDir) -> dict[str, str]:
    from pdserve.run.directory import phase_now

    try:
        state = run_dir.read_state()
    except (StateError, NotOursError):
        return {"phase": "unreadable", "endpoint": ""}
    return {"phase": phase_now(run_dir, state), "endpoint": state.endpoint}


def _prune(*, as_json: bool, dry_run: bool) -> None:
    """Remove old runs and print one line for each, or for each that would be removed; exit 8 when one could not be."""
    from pdserve.run.directory import home
    from pdserve.run.retention import prune_all

    removed = prune_all(home(os.environ), dry_run=dry_run)
    if as_json:
        typer.echo(json.dumps([_pruned_row(run, dry_run=dry_run) for run in removed], indent=2))
    else:
        for run in removed:
            if run.problem is None:
                done = "would remove" if dry_run else "removed"
                typer.echo(printable(f"{done} {run.path} {size_text(run.size)}"))
            else:
                typer.echo(printable(f"left {run.path}: {run.problem}"), err=True)
        gone = [run for run in removed if run.problem is None]
        size = size_text(sum(run.size for run in gone))
        typer.echo(f"{len(gone)} old run(s), {size}" if gone else "no old runs")
    if any(run.problem is not None for run in removed):
        raise typer.Exit(StateError.exit_code)


def _pruned_row(run: RemovedRun, *, dry_run: bool) -> dict[str, str | int | bool | None]:
    return {
        "run": str(run.path),
        "bytes": run.size,
        "removed": run.problem is None and not dry_run,
        "problem": run.problem,
    }


@verbs.command()
def doctor(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[DEPLOYMENT|RUN_DIR]", help="A deployment, or a run directory; the only one if there is one."
        ),
    ] = None,
    json_: JsonOption = False,
    bundle: Annotated[
        Path | None,
        typer.Option("--bundle", metavar="FILE", help="Also write an archive for an issue, without secrets (.tar.gz)."),
    ] = None,
    logs: Annotated[
        bool, typer.Option("--logs", help="With --bundle: the ends of the logs too; engines log prompts.")
    ] = False,
) -> None:
    """Find why a run failed, or is slow: causes with evidence and fix. Changes nothing. Exit 10 when there are any.

    It reads the run directory of a deployment that lives or is over: logs, history, records. It asks the
    processes that live for their figures.
    """
    from pdserve.doctor.bundle import contents, make_member, members, write
    from pdserve.doctor.read_run import find_run, known_secrets, read_logs, read_run, unset_secrets
    from pdserve.doctor.rules import diagnose
    from pdserve.run.directory import home

    if logs and bundle is None:
        raise typer.BadParameter("--logs adds the logs to an archive: give --bundle FILE too")
    run_dir = find_run(target, home(os.environ))
    records = read_run(run_dir)
    diagnoses = diagnose(records, read_logs(run_dir, records))
    document = json.dumps(_diagnosis_document(records, diagnoses), indent=2)
    if json_:
        typer.echo(document)
    else:
        _show_diagnoses(records, diagnoses)
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


def _diagnosis_document(records: RunRecords, diagnoses: list[Diagnosis]) -> dict[str, object]:
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


def _show_diagnoses(records: RunRecords, diagnoses: list[Diagnosis]) -> None:
    out = VerbOutput()
    for line, style in _diagnosis_lines(records, diagnoses):
        out.line(line, style)


def _diagnosis_lines(records: RunRecords, diagnoses: list[Diagnosis]) -> Iterator[tuple[str, str]]:
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
