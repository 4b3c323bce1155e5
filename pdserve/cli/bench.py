"""`pdserve bench`: a load, each measurement of it, and the tables of its figures."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from pdserve.cli.options import (
    USUAL_LIMIT,
    ClientPythonOption,
    JsonOption,
    LimitOption,
    NameArgument,
    TokenizerOption,
)
from pdserve.cli.output import Cell, VerbOutput, table
from pdserve.errors import InvalidBenchError

if TYPE_CHECKING:
    from rich.table import Table

    from pdserve.bench.figures import Spread
    from pdserve.bench.result import BenchResult, Measurement
    from pdserve.bench.workload import Load, RequestTrace, SloMetric, Workload

verbs = typer.Typer()
_INVALID = "bold red"
USUAL_INPUT = 1024


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
        from pdserve.bench.clients import make_aiperf
        from pdserve.operations.progress import ShownProgress
        from pdserve.system.stop_signals import run_to_its_end

        run_to_its_end(make_aiperf(os.environ, ShownProgress().note))
        return
    from pdserve.bench.clients import client_of
    from pdserve.bench.result import new_folder
    from pdserve.bench.run import Task
    from pdserve.bench.run import bench as measure
    from pdserve.operations.current_run import serving
    from pdserve.run.directory import home, new_run_id
    from pdserve.system.stop_signals import run_to_its_end

    asked = workload(
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
        slo=read_slo(slo),
    )
    sent, loads, replayed = work(asked, concurrency, rate, requests, seconds=duration, grace_seconds=grace)
    deployment = serving(home(os.environ), name, "bench")
    sender = client_of(deployment.plan, sent, loads[0], replayed, os.environ, python=python, tokenizer=tokenizer)
    folder = new_folder(home(os.environ), deployment.plan.name, new_run_id())
    out = VerbOutput(stderr=json_)

    def show(measurement: Measurement) -> None:
        out.line(_line(measurement), "" if measurement.verdict.valid else _INVALID)

    result = run_to_its_end(measure(deployment, Task(sent, loads, sender, limit, replayed), folder, show))
    if json_:
        typer.echo(json.dumps({"folder": str(folder), **result.model_dump(mode="json")}, indent=2))
    else:
        _show(result, folder, out)
    _raise_for_verdict(result, folder)


def _line(measurement: Measurement) -> str:
    figures = measurement.figures
    what = f"{measurement.load.title}, repeat {measurement.repeat + 1}: {measurement.verdict.status}"
    return f"{what}, {figures.completed} of {figures.requests} requests, {figures.output_per_second:.1f} tokens/s"


def _show(result: BenchResult, folder: Path, out: VerbOutput) -> None:
    from pdserve.bench.result import RESULT

    out.table(_latencies(result.measurements))
    out.table(_rates(result))
    out.table(windows(result))
    for line in _notes(result.measurements):
        out.line(line)
    out.line(f"result: {folder / RESULT}")
    out.line(f"next: pdserve compare {folder.name} OTHER")


def _head(measurement: Measurement) -> tuple[str, Cell]:
    verdict = measurement.verdict
    style = "green" if verdict.valid else _INVALID
    return f"{measurement.load.title} #{measurement.repeat + 1}", (verdict.status, style)


def _latencies(measurements: Iterable[Measurement]) -> Table:
    rows = (
        (*_head(each), *map(_spread, (each.figures.ttft, each.figures.itl, each.figures.tpot, each.figures.e2e)))
        for each in measurements
    )
    columns = ("load", "verdict", "TTFT", "ITL", "TPOT", "E2E")
    return table(columns, rows, title="milliseconds: mean / p50 / p90 / p95 / p99")


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    return " / ".join(f"{value:.1f}" for value in (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99))


def _rates(result: BenchResult) -> Table:
    columns = ["load", "verdict", "requests", "output", "total", "output/GPU", "user 1000/ITL p50", "1000/mean TPOT"]
    rows = []
    for each in result.measurements:
        figures = each.figures
        cells = [
            f"{figures.requests_per_second:.2f}",
            f"{figures.output_per_second:.1f}",
            f"{figures.total_per_second:.1f}",
            _number(figures.output_per_second_per_gpu),
            _number(figures.interactivity_by_itl.get("p50")),
            _number(figures.interactivity_by_tpot),
        ]
        if result.workload.slo:
            cells += [_number(figures.goodput), _share(figures.good_share)]
        rows.append((*_head(each), *cells))
    columns += ["goodput", "good"] if result.workload.slo else []
    return table(columns, rows, title="per second; user: tokens that a user sees")


def windows(result: BenchResult) -> Table:
    """Return the table of what pdserve counted in each measurement."""
    theory = "-" if result.trace is None else f"{'~' if result.trace.estimated else ''}{result.trace.prefix_hit:.0%}"
    columns = (
        *("load", "verdict", "prompt tokens computed", f"prefix hit (theory {theory})", "received by decode"),
        *("computed by decode", "KV moved, MiB / s", "LMCache had", "stored / loaded", "waiting", "KV use"),
        "CPU client / proxy",
    )
    rows = []
    for each in result.measurements:
        window = each.window
        written, read = window.lmcache.get("written"), window.lmcache.get("read")
        cells = (
            _count(window.prefill.get("computed")),
            _share(window.prefix_hit),
            _count(window.decode.get("received")),
            _count(window.decode.get("computed")),
            f"{_mib(window.moved_bytes)} / {_number(window.moved_seconds)}",
            _share(window.cache_hit),
            f"{_count(written)} / {_count(read)}",
            _count(window.peaks.waiting),
            _share(window.peaks.kv_usage),
            f"{_number(window.client_cpu.used)} / {_number(window.proxy_cpu.used)}",
        )
        rows.append((*_head(each), *cells))
    return table(columns, rows, title="measured by pdserve over the same window")


def _notes(measurements: Iterable[Measurement]) -> Iterator[str]:
    """Yield each line once: why figures do not count, what could not be checked, what a reader may take wrongly."""
    lines: dict[str, list[str]] = {}
    for each in measurements:
        title = _head(each)[0]
        for reason in each.verdict.reasons:
            lines.setdefault(f"INVALID, {reason.check}: {reason.text}", []).append(title)
        for reason in each.verdict.unchecked:
            lines.setdefault(f"not checked, {reason.check}: {reason.text}", []).append(title)
        if each.figures.cut:
            lines.setdefault(f"{each.figures.cut} requests were open when the time was over", []).append(title)
        if (chunk := each.figures.tokens_per_chunk) is not None and chunk > 1.05:
            note = "an answer's chunks hold several tokens: ITL is the time between chunks, TPOT that of a token"
            lines.setdefault(note, []).append(title)
    for line, titles in lines.items():
        yield f"{line} ({', '.join(titles)})"


def _raise_for_verdict(result: BenchResult, folder: Path) -> None:
    if result.valid:
        return
    wrong = [each for each in result.measurements if not each.verdict.valid]
    raise InvalidBenchError(
        f"{len(wrong)} of {len(result.measurements)} measurements are INVALID",
        where=result.provenance.deployment,
        cause="what was measured is not what was asked for; each reason is below",
        todo=f"correct it and measure again; the client's output and logs are in {folder}",
        evidence=tuple(
            f"{_head(each)[0]}: {reason.check}: {reason.text}" for each in wrong for reason in each.verdict.reasons
        ),
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _mib(value: float | None) -> str:
    return "-" if value is None else f"{value / 2**20:.1f}"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def workload(**typed: Any) -> Workload:
    """Return what is sent. The usual lengths are not for a trace. Raises BadParameter."""
    from pydantic import ValidationError

    from pdserve.bench.workload import USUAL_OUTPUT, ClientKind, Workload

    if typed["client"] not in (None, *get_args(ClientKind)):
        raise _bad_option("--client", f"{typed['client']!r} is no client: {' or '.join(get_args(ClientKind))}")
    if typed["trace"] is None:
        typed |= {
            "input_tokens": typed["input_tokens"] or USUAL_INPUT,
            "output_tokens": typed["output_tokens"] or USUAL_OUTPUT,
        }
    try:
        return Workload(**typed)
    except ValidationError as error:
        raise typer.BadParameter(error.errors()[0]["msg"].removeprefix("Value error, ")) from None


def work(
    some: Workload,
    concurrencies: str | None,
    rates: str | None,
    requests: int | None,
    *,
    seconds: float | None = None,
    grace_seconds: float | None = None,
) -> tuple[Workload, tuple[Load, ...], RequestTrace | None]:
    """Return the workload with the digest of its trace, the loads, the trace. Raises BadParameter and RecipeError."""
    from pdserve.bench.workload import with_trace

    if grace_seconds is not None and seconds is None:
        raise _bad_option("--grace", "it is the time after --duration: give both")
    if seconds is not None and some.client == "vllm":
        raise _bad_option("--duration", "vllm bench serve has none: --client aiperf")
    trace = None
    if some.trace is not None:
        if requests is not None:
            raise _bad_option("--requests", "a trace has its own requests: --sessions takes the first of its sessions")
        some, trace = with_trace(some)
    many = requests if trace is None else trace.requests
    chosen = read_loads(concurrencies, rates, many, seconds=seconds, grace_seconds=grace_seconds)
    if trace is not None and (most := max((each.concurrency or 0 for each in chosen), default=0)) > len(trace.sessions):
        raise _bad_option("--concurrency", f"{len(trace.sessions)} sessions are never {most} at a time")
    return some, chosen, trace


def read_loads(
    concurrencies: str | None,
    rates: str | None,
    requests: int | None,
    *,
    seconds: float | None = None,
    grace_seconds: float | None = None,
) -> tuple[Load, ...]:
    """Read loads such as `1,4,8` and `0.5,1`. Raises BadParameter."""
    from pdserve.bench.workload import Load, usual_requests

    many = _numbers("--concurrency", concurrencies)
    if fraction := next((number for number in many if number != int(number)), None):
        raise _bad_option("--concurrency", f"{fraction:g} is no whole number")
    if requests is not None and (most := max(many, default=0)) > requests:
        raise _bad_option("--requests", f"{requests} requests are never {most:g} at a time; give {most:g} or more")
    measured: list[tuple[int | None, float | None]] = [(int(each), None) for each in many]
    measured += [(None, each) for each in _numbers("--rate", rates)]
    chosen = tuple(
        Load(
            concurrency=concurrency,
            rate=rate,
            requests=requests or usual_requests(concurrency or rate or 0.0),
            seconds=seconds,
            grace_seconds=grace_seconds,
        )
        for concurrency, rate in measured
    )
    if not chosen:
        raise typer.BadParameter("give a load: --concurrency 1,4,8, or --rate 0.5,1")
    return chosen


def read_slo(text: str | None) -> dict[SloMetric, float]:
    """Read limits such as `ttft=500,itl=50`, in milliseconds. Raises BadParameter."""
    from pdserve.bench.workload import SLO_MEANING, SloMetric

    limits: dict[SloMetric, float] = {}
    for part in filter(None, (part.strip() for part in (text or "").split(","))):
        name, _, value = part.partition("=")
        metric = next((known for known in get_args(SloMetric) if known == name), None)
        limit = _positive(value)
        if metric is None or limit is None:
            names = ", ".join(f"{known} ({meaning})" for known, meaning in SLO_MEANING.items())
            raise _bad_option("--slo", f"{part!r} is no limit; a limit is NAME=MILLISECONDS, with the names {names}")
        limits[metric] = limit
    return limits


def _numbers(option: str, text: str | None) -> list[float]:
    numbers = []
    for part in filter(None, (part.strip() for part in (text or "").split(","))):
        number = _positive(part)
        if number is None:
            raise _bad_option(option, f"{part!r} is no number above 0; it is a list with commas")
        numbers.append(number)
    return list(dict.fromkeys(numbers))


def _positive(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number < float("inf") else None


def _bad_option(option: str, text: str) -> typer.BadParameter:
    return typer.BadParameter(text, param_hint=option)
