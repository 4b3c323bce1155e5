"""Verbs that check and show a recipe: `validate`, `plan`, `render`, `preflight`, `schema`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdserve.cli import options
from pdserve.cli.options import (
    ClusterOption,
    JsonOption,
    OnlineOption,
    RecipeArgument,
    SetOption,
    ThisMachineOption,
    UnsetOption,
    load_and_place,
)
from pdserve.cli.output import VerbOutput
from pdserve.errors import PreflightError, RecipeError, StateError

if TYPE_CHECKING:
    from pdserve.operations.look import Destination
    from pdserve.operations.shown_change import ShownChange
    from pdserve.plan.model import Plan
    from pdserve.preflight.container_images import Report
    from pdserve.preflight.finding import Finding
    from pdserve.recipe.load.loader import LoadedRecipe

verbs = typer.Typer()
_ORDER = ("failed", "warning", "unknown", "ok")
_STYLES = {"failed": "bold red", "warning": "yellow", "unknown": "cyan", "ok": "green"}


@verbs.command()
def validate(
    recipe: RecipeArgument, online: OnlineOption = False, set_: SetOption = None, unset: UnsetOption = None
) -> None:
    """Check a recipe and plan it, without looking at this machine, but for the config.json of its model."""
    from pdserve.operations.plan_recipe import check_job, load, plan_for

    planned = plan_for(load(recipe, set_ or [], unset or []), None, run_dir="RUN_DIR", run_id="RUN_ID", online=online)
    check_job(planned)
    _warn(*planned.loaded.warnings, *planned.plan.warnings)
    plan = planned.plan
    typer.echo(f"{recipe}: valid. {plan.name} ({plan.mode}, {plan.platform}) on {len(plan.nodes)} node(s):")
    for process in plan.processes:
        devices = f"  devices {','.join(map(str, process.devices))}" if process.devices else ""
        ports = " ".join(f"{purpose}:{port}" for purpose, port in process.ports.items())
        typer.echo(f"  {process.name:<14} {process.node:<10} {ports}{devices}")


def _warn(*warnings: str) -> None:
    """Print each warning once, on stderr."""
    for warning in dict.fromkeys(warnings):
        typer.echo(f"warning: {warning}", err=True)


@verbs.command()
def plan(
    recipe: RecipeArgument,
    json_: JsonOption = False,
    online: OnlineOption = False,
    device_memory: options.DeviceMemory = None,
    kv_memory: options.KvMemory = None,
    link: options.Link = None,
    disk: options.Disk = None,
    prompt_tokens: options.PromptTokens = None,
    output_tokens: options.OutputTokens = None,
    prefill_rate: options.PrefillRate = None,
    decode_rate: options.DecodeRate = None,
    queue_seconds: options.QueueSeconds = None,
    set_: SetOption = None,
    unset: UnsetOption = None,
) -> None:
    """Compute what a recipe takes and holds, before it starts: weights, KV blocks, requests, L1, transfer, start.

    Computed from config.json and the headers of the weights on this machine, without a device. Exit 2 when something
    is sure to fail. What is assumed or known as a range only is shown as that; docs/plan.md has the errors.
    """
    from pdserve.operations.plan_recipe import load
    from pdserve.operations.size import size
    from pdserve.sizing import SizingOptions, sizing_rows

    given = SizingOptions(
        device_gib=device_memory,
        kv_gib=kv_memory,
        link_gbit=link,
        disk_gb=disk,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        prefill_rate=prefill_rate,
        decode_rate=decode_rate,
        queue_seconds=queue_seconds,
    )
    sizing, planned = size(load(recipe, set_ or [], unset or []), given, online=online)
    _warn(*planned.loaded.warnings, *planned.plan.warnings)
    if json_:
        typer.echo(sizing.model_dump_json(indent=2))
    else:
        out = VerbOutput()
        for of, label, value in sizing_rows(sizing):
            out.line(f"{of}: {label}: {value}")
        for crossing in sizing.crossings:
            typer.echo(
                f"{crossing.severity}: {planned.loaded.locate(crossing.where)}: {crossing.where}: {crossing.what}"
            )
            typer.echo(f"  what to do: {crossing.todo}")
        if not sizing.crossings:
            typer.echo("no edge is crossed")
    if any(crossing.severity == "error" for crossing in sizing.crossings):
        raise typer.Exit(RecipeError.exit_code)


@verbs.command()
def render(
    recipe: RecipeArgument,
    json_: JsonOption = False,
    slurm: Annotated[bool, typer.Option("--slurm", help="The batch script that asks for the recipe's nodes.")] = False,
    set_: SetOption = None,
    unset: UnsetOption = None,
) -> None:
    """Print every command and environment of a recipe: as a shell script, or the plan as JSON.

    What a deployment of its name would go on with where it runs: `pdserve up RECIPE --dry-run`.
    """
    from pdserve.operations.plan_recipe import batch_script, load, plan_for, recipe_words
    from pdserve.operations.shown_change import with_shown_agents

    if json_ and slurm:
        raise typer.BadParameter("--slurm is a script and --json the plan: give one of them")
    loaded = load(recipe, set_ or [], unset or [])
    planned = plan_for(loaded, None, run_dir=f"run-{recipe.stem}", run_id="rendered")
    plan = planned.plan if slurm else with_shown_agents(planned).plan
    _warn(*loaded.warnings, *plan.warnings)
    if slurm:
        typer.echo(batch_script(planned, recipe_words(recipe, set_ or [], unset or [])), nl=False)
    else:
        show_plan(plan, None, as_json=json_)


def show_plan(plan: Plan, change: ShownChange | None, *, as_json: bool, replace: bool = False) -> None:
    """Print a plan as a script, with the change in its first comments; or as JSON, with the change as `change`.
    `replace`: as `ShownChange.lines`."""
    from pdserve.plan.bash import render_shell

    if as_json:
        document = plan.model_dump(mode="json")
        if change is not None:
            document["change"] = change.model_dump(mode="json")
        typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
        return
    first, *others = render_shell(plan).split("\n")
    comments = [] if change is None else [f"# {line}" for line in change.lines(replace=replace)]
    typer.echo("\n".join([first, *comments, *others]), nl=False)


@verbs.command()
def preflight(
    recipe: RecipeArgument,
    json_: JsonOption = False,
    cluster: ClusterOption = None,
    this_machine: ThisMachineOption = False,
    fabric: Annotated[
        bool, typer.Option("--fabric", help="Also try a transfer by the recipe's engine for each pair of nodes.")
    ] = False,
    min_gbps: Annotated[
        float | None,
        typer.Option("--min-gbps", min=0.001, help="With --fabric: the least rate of each pair, in Gbit/s."),
    ] = None,
    set_: SetOption = None,
    unset: UnsetOption = None,
) -> None:
    """Check what the recipe needs of every node, and start nothing. Exit 3 when something is missing.

    The nodes are those that `up` would use: of the Slurm job, of --cluster, or this machine.
    """
    from pdserve.preflight.finding import failures

    if min_gbps is not None and not fabric:
        raise typer.BadParameter("--min-gbps belongs to --fabric")
    loaded, there = load_and_place(recipe, set_, unset, cluster, this_machine=this_machine)
    progress = VerbOutput(stderr=True)
    for warning in there.warnings:
        progress.line(f"warning: {warning}")
    all_findings = find_all(loaded, there, progress.line, fabric=fabric, min_gbps=min_gbps)
    findings = sorted(all_findings, key=lambda finding: _ORDER.index(finding.status))
    if json_:
        typer.echo(json.dumps([finding.model_dump() for finding in findings], indent=2))
    else:
        out = VerbOutput()
        for finding in _collapse_findings(findings):
            shown = finding.model_copy(update={"value": _value(finding, loaded)})
            out.line(shown.line(), _STYLES[finding.status])
            for line in finding.evidence:
                out.line(f"  | {line}")
        out.line(_summary(findings))
    if failures(findings):
        raise typer.Exit(PreflightError.exit_code)


def _value(finding: Finding, loaded: LoadedRecipe) -> str:
    from pdserve.recipe.model import Recipe

    """Return a finding's value with the place that asks for it: file and line for a key of the recipe."""
    where = finding.where
    if where is not None and where.partition(".")[0] in Recipe.model_fields:
        where = loaded.locate(where)
    return f"{where}: {finding.value}" if where else finding.value


def _collapse_findings(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield findings; what is well on several nodes takes one row a check."""
    well: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.status == "ok":
            well.setdefault(finding.check, []).append(finding)
        else:
            yield finding
    for same in well.values():
        first = same[0]
        if len({finding.node for finding in same}) == 1:
            yield from same
        else:
            value = first.value if len({finding.value for finding in same}) == 1 else f"{first.value}, ..."
            yield first.model_copy(update={"node": f"{len(same)} nodes", "value": value})


def _summary(findings: Sequence[Finding]) -> str:
    counts = {status: sum(finding.status == status for finding in findings) for status in reversed(_ORDER)}
    parts = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    return f"{len(findings)} checks: {parts or 'nothing to check'}"


def find_all(
    loaded: LoadedRecipe, there: Destination, report: Report, *, fabric: bool = False, min_gbps: float | None = None
) -> tuple[Finding, ...]:
    """Look for everything that a start would fail of, and return all findings. `report` gets lines while an image is
    fetched. `fabric`: also of transfers between the nodes, which must reach `min_gbps` (None: what the recipe has).

    Raises StateError where the deployment runs: its ports and its memory are its own, and every check would blame it;
    and as `look`.
    """
    from pdserve.operations.current_run import find_running
    from pdserve.operations.look import look
    from pdserve.operations.size import find_crossings
    from pdserve.preflight.fabric import Wish, find_untried
    from pdserve.preflight.finding import find_warnings
    from pdserve.run.directory import home

    name = loaded.recipe.name
    if find_running(home(os.environ), name) is not None:
        raise StateError(
            f"{name} is running",
            cause="preflight looks for what a start from nothing needs, and the deployment has it",
            todo=f"pdserve status {name}; pdserve up RECIPE checks what it would change",
        )
    recipe = loaded.recipe
    least = recipe.fabric.min_gbps if min_gbps is None else min_gbps
    wish = Wish(python=recipe.engine.python, min_gbps=least, rails=True) if fabric else None
    seen = look(loaded, there.machines, None, report=report, fabric=wish)
    plan = seen.planned.plan
    here_only = find_untried(plan) if fabric and there.machines is None else None
    return (*find_warnings(plan), *find_crossings(seen.planned), *seen.findings, *([here_only] if here_only else []))


@verbs.command()
def schema(
    cluster: Annotated[bool, typer.Option("--cluster", help="Of cluster files instead of recipes.")] = False,
) -> None:
    """Print the JSON Schema of recipes, for editors."""
    from pdserve.recipe.schema import json_schema

    typer.echo(json.dumps(cluster_schema() if cluster else json_schema(), indent=2))


def cluster_schema() -> dict[str, Any]:
    """Return the schema of cluster files as data."""
    from pdserve.reach.cluster_file import Cluster
    from pdserve.recipe.schema import json_schema_of

    return json_schema_of(Cluster, "pdserve cluster file", "The machines of a deployment, schema 1.")
