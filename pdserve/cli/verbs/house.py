"""Verbs about patches, keys and all deployments of a user."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdserve.cli.options import JsonOption, NameArgument

verbs = typer.Typer()


@verbs.command()
def patches(name: NameArgument = None, json_: JsonOption = False) -> None:
    """Show every patch of vLLM and LMCache: why, for which versions, whether it applies here, where it is active."""
    from pdserve.cli.patches import run

    run(name, as_json=json_)


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
    from pdserve.cli.new_key import run

    run(
        name,
        file,
        max_requests=max_requests,
        requests_per_minute=requests_per_minute,
        priority=priority,
    )


@verbs.command("list")
def list_(
    json_: JsonOption = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove old runs instead, by the recipe's `retention`, and list them.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --prune: only list them.")] = False,
) -> None:
    """List deployments of this user on this machine. With --prune: without their old runs."""
    from pdserve.cli.listing import prune as prune_runs
    from pdserve.cli.listing import run

    if dry_run and not prune:
        raise typer.BadParameter("--dry-run belongs to --prune")
    if prune:
        prune_runs(as_json=json_, dry_run=dry_run)
    else:
        run(as_json=json_)
