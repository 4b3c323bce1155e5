"""Verbs that measure a deployment, and put two measurements beside each other."""

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
    from pdserve.cli.bench import options as bench_options
    from pdserve.cli.bench.measure import run
    from pdserve.cli.bench.setup import run_setup

    if setup:
        run_setup()
        return
    workload = bench_options.workload(
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
        slo=bench_options.slo(slo),
    )
    timed = bench_options.Timed(duration, grace)
    what = bench_options.work(workload, concurrency, rate, requests, timed)
    run(name, *what, python=python, tokenizer=tokenizer, limit_seconds=limit, as_json=json_)


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
    """What differs between two benchmarks: versions, hardware, recipe; then each figure, with the noise over repeats.

    Of two sweeps, each point of one beside the point of the same settings of the other. A change within the noise is
    shown in parentheses and is not called real. INVALID repeats are left out. The page needs the extra `report`.
    """
    from pdserve.cli.bench.compare import run

    run(a, b, as_json=json_, page=html)
