"""Verbs that measure a deployment, once or over a sweep, and put measurements beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdserve.cli.options import (
    USUAL_LIMIT,
    ClientPythonOption,
    JsonOption,
    LimitOption,
    NameArgument,
    ThisMachineOption,
    TokenizerOption,
)

verbs = typer.Typer()


@verbs.command()
def bench(
    name: NameArgument = None,
    setup: Annotated[
        bool,
        typer.Option(
            "--setup", help="Only install the client AIPerf, in an environment of its own (1.2 GB), unless it is there."
        ),
    ] = False,
    client: Annotated[
        str | None,
        typer.Option(
            "--client", metavar="vllm|aiperf", help="What sends the requests; else vllm where it can, else aiperf."
        ),
    ] = None,
    input_tokens: Annotated[
        int | None,
        typer.Option("--input-tokens", "--isl", min=1, help="Tokens of each prompt; else 1024.", show_default=False),
    ] = None,
    output_tokens: Annotated[
        int | None,
        typer.Option(
            "--output-tokens",
            "--osl",
            min=1,
            help="Tokens of each answer, of a trace of those whose length it does not have; else 128.",
            show_default=False,
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option("--trace", metavar="FILE", help="Replay a trace: a file, or agentic-tiny, which pdserve has."),
    ] = None,
    sessions: Annotated[
        int | None, typer.Option("--sessions", min=1, help="Only so many sessions of the trace, the first ones.")
    ] = None,
    trace_block: Annotated[
        int | None,
        typer.Option("--trace-block", min=1, help="Tokens of a block with a hash id; else the size that fits."),
    ] = None,
    session_header: Annotated[
        str | None,
        typer.Option("--session-header", help="Of the session of a trace; else X-Session-ID.", show_default=False),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option("--concurrency", metavar="N,N", help="Requests (of a trace: sessions) open at a time, a list."),
    ] = None,
    rate: Annotated[
        str | None, typer.Option("--rate", metavar="N,N", help="Requests a second (Poisson arrivals), a list.")
    ] = None,
    requests: Annotated[
        int | None, typer.Option("--requests", min=1, help="Of each load; else ten times the load, 32 at least.")
    ] = None,
    duration: Annotated[
        float | None, typer.Option("--duration", min=1, help="Send nothing after so many seconds (client aiperf).")
    ] = None,
    grace: Annotated[
        float | None, typer.Option("--grace", min=0, help="Seconds that open requests then have; 30.")
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Times that each load is measured.")] = 3,
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Requests before each measurement.")] = 8,
    seed: Annotated[int, typer.Option("--seed", help="Of the prompts.")] = 0,
    max_failed: Annotated[
        float, typer.Option("--max-failed", min=0, max=0.99, help="Share of the requests that may fail.")
    ] = 0.0,
    slo: Annotated[
        str | None,
        typer.Option(
            "--slo",
            metavar="NAME=MS,NAME=MS",
            help="What a good request takes at most, of ttft, tpot, itl, e2e: --slo ttft=500,itl=50",
        ),
    ] = None,
    python: ClientPythonOption = None,
    tokenizer: TokenizerOption = None,
    limit: LimitOption = USUAL_LIMIT,
    json_: JsonOption = False,
) -> None:
    """Measure a running deployment, with prompts of a fixed length or a trace, and judge whether the figures count.

    The client is `vllm bench serve`, or AIPerf, which replays traces. Engines, proxy and LMCache are read before and
    after. The result is in $PDSERVE_HOME/NAME/bench. Exit 9 when a measurement is INVALID: docs/guides/bench.md has the
    reasons, and the formats of traces.
    """
    if setup:
        import os

        from pdserve.bench.clients import make_aiperf
        from pdserve.operations.progress import ShownProgress
        from pdserve.system.stop_signals import run_to_its_end

        run_to_its_end(make_aiperf(os.environ, ShownProgress().note))
        return
    from pdserve.cli import bench as measuring

    workload = measuring.workload(
        client=client,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        trace=trace,
        sessions=sessions,
        trace_block=trace_block,
        session_header=session_header,
        seed=seed,
        warmup=warmup,
        repeats=repeats,
        max_failed=max_failed,
        slo=measuring.slo(slo),
    )
    timed = measuring.TimeLimits(duration, grace)
    what = measuring.work(workload, concurrency, rate, requests, timed)
    measuring.run_bench(name, *what, python=python, tokenizer=tokenizer, limit_seconds=limit, as_json=json_)


@verbs.command()
def compare(
    a: Annotated[
        str, typer.Argument(metavar="A", help="A result of bench: its id, folder or file; or a sweep's folder.")
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one of the same kind.")],
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Also write it as a page of one file.", show_default=False),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Compare two benchmarks: versions, hardware, recipe; then each figure, with the noise over repeats.

    Of two sweeps, each point of one beside the point of the same settings of the other. A change within the noise is
    shown in parentheses and is not called real. INVALID repeats are left out. The page needs the extra `report`.
    """
    from pdserve.cli.compare import run_compare as run

    run(a, b, as_json=json_, page=html)


@verbs.command()
def sweep(
    file: Annotated[Path, typer.Argument(metavar="SWEEP", help="The sweep file (YAML).", show_default=False)],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the points, their order and the estimated time.")
    ] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Measure points that are INVALID again.")] = False,
    slurm: Annotated[
        bool,
        typer.Option("--slurm", help="Submit it to Slurm as a job array, a task for each deployment, and follow it."),
    ] = False,
    at_once: Annotated[
        int | None, typer.Option("--at-once", min=1, metavar="N", help="With --slurm: tasks that run at a time.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="With --slurm: return once it is submitted.")] = False,
    deployment: Annotated[
        str | None,
        typer.Option(
            "--only",
            metavar="ID",
            help="Only the points of this deployment, by the id that --dry-run prints; it gets a name of its own, so "
            "that others of the sweep can run beside it.",
        ),
    ] = None,
    this_machine: ThisMachineOption = False,
    python: ClientPythonOption = None,
    tokenizer: TokenizerOption = None,
    limit: LimitOption = USUAL_LIMIT,
) -> None:
    """Measure every point of a sweep file: lists over keys of a recipe, workloads and loads.

    It runs on this machine, inside a Slurm job on the job's nodes, with --slurm as job arrays. A deployment is started
    once for all of its points, or anew for each where only that empties its caches. A point that was measured is not
    measured again: the same command goes on after a crash. Exit 12 when a point is INVALID or was not measured:
    docs/guides/sweep.md has the format.
    """
    from pdserve.cli.sweep import ArrayOptions, run_sweep
    from pdserve.sweep.run import SweepOptions

    for option, typed in {"--at-once": at_once is not None, "--detach": detach}.items():
        if typed and not slurm:
            raise typer.BadParameter(f"{option} belongs to --slurm")
    for option, typed in {"--only": deployment is not None, "--this-machine": this_machine}.items():
        if typed and slurm:
            raise typer.BadParameter(
                f"--slurm submits the deployments as tasks, {option} runs here: give one of the two"
            )
    run_sweep(
        file,
        SweepOptions(python, tokenizer, limit, this_machine),
        dry=dry_run,
        retry=retry,
        deployment=deployment,
        array=ArrayOptions(at_once, detach) if slurm else None,
    )


@verbs.command()
def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER...", help="Of sweeps and of results of bench.", show_default=False)
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The page.")] = Path("report.html"),
    pictures: Annotated[
        Path | None, typer.Option("--pictures", metavar="FOLDER", help="Also write each picture as PNG and SVG.")
    ] = None,
) -> None:
    """Write results of sweeps and benchmarks as a page of one file: provenance, pictures, figures, verdicts.

    An INVALID measurement is marked in every table and picture, and no curve passes through it. The pictures need
    matplotlib (extra `report`).
    """
    from pdserve.cli.compare import run_report as run

    run(folders, out, pictures)
