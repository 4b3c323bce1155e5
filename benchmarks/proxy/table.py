"""The report on the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from benchmarks.proxy.goals import OURS, REFERENCE, Goal
from benchmarks.proxy.results import Results, Summary

COLUMNS = (
    ("requests", ("requests_per_s", "cpu_ms_per_request", "latency_p50_ms", "latency_p99_ms")),
    ("body", ("requests_per_s", "cpu_ms_per_request", "latency_p50_ms", "latency_p99_ms")),
    ("ttft", ("ttft_p50_ms", "ttft_p99_ms", "added_ttft_p50_ms", "added_ttft_p99_ms")),
    (
        "streams",
        (
            "delivered_per_s", "cpu_s_per_1000_chunks", "delay_p50_ms", "delay_p99_ms", "added_delay_p50_ms",
            "added_delay_p99_ms", "chunks_per_read", "rss_start_mib", "rss_streams_mib", "rss_after_mib",
        ),
    ),
)  # fmt: skip
SHORT = {
    "requests_per_s": "req/s",
    "cpu_ms_per_request": "CPU ms/req",
    "latency_p50_ms": "p50 ms",
    "latency_p99_ms": "p99 ms",
    "ttft_p50_ms": "TTFT p50 ms",
    "ttft_p99_ms": "TTFT p99 ms",
    "added_ttft_p50_ms": "added p50 ms",
    "added_ttft_p99_ms": "added p99 ms",
    "delivered_per_s": "chunks/s",
    "cpu_s_per_1000_chunks": "CPU s/1k",
    "delay_p50_ms": "delay p50 ms",
    "delay_p99_ms": "delay p99 ms",
    "added_delay_p50_ms": "added p50 ms",
    "added_delay_p99_ms": "added p99 ms",
    "chunks_per_read": "chunks/read",
    "rss_start_mib": "MiB start",
    "rss_streams_mib": "MiB streams",
    "rss_after_mib": "MiB after",
}

Row = list[str]


def number(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.1 else f"{value:.4f}"


def tables(summary: Summary) -> Iterable[tuple[str, Row, list[Row]]]:
    """(title, header, rows) of every family of scenarios; a figure has its ratio to the reference behind it."""
    for family, figures in COLUMNS:
        rows = []
        for scenario, systems in summary.items():
            if not scenario.startswith(family):
                continue
            reference = systems.get(REFERENCE, {})
            for system, values in systems.items():
                cells = [_cell(values.get(figure), reference.get(figure), system) for figure in figures]
                rows.append([scenario, system, *cells])
        if rows:
            yield family, ["scenario", "system", *(SHORT[figure] for figure in figures)], rows


def _cell(value: float | None, reference: float | None, system: str) -> str:
    if value is None:
        return "-"
    if reference is None or reference <= 0 or system == REFERENCE:
        return number(value)
    return f"{number(value)} ({value / reference:.2f}x)"


def goal_rows(goals: Iterable[Goal]) -> tuple[Row, list[Row]]:
    header = ["goal", "scenario", "pdserve", REFERENCE, "measured", "asked", "verdict"]
    rows = []
    for goal in goals:
        sign = "<=" if goal.at_most else ">="
        asked = f"{sign} {goal.limit:.3g} {goal.unit}"
        reference = number(goal.reference) if goal.reference is not None else "-"
        value = f"{goal.value:.2f} {goal.unit}"
        rows.append(
            [goal.name, goal.scenario, number(goal.ours), reference, value, asked, "pass" if goal.passed else "FAIL"]
        )
    return header, rows


SOAK = ("rss_cold_mib", "rss_warm_mib", "rss_after_requests_mib", "rss_during_streams_mib", "rss_after_streams_mib")


def soak_rows(results: Results) -> tuple[Row, list[Row]]:
    header = ["system", "requests", "streams", *(name.removeprefix("rss_").replace("_", " ") for name in SOAK)]
    return header, [
        [row["system"], f"{row['requests']:,}", f"{row['streams']:,}", *(number(row[name]) for name in SOAK)]
        for row in results.soak
    ]


FEATURE_SCENARIOS = ("requests", "body-100kB")


def feature_rows(summary: Summary) -> tuple[Row, list[Row]]:
    """CPU a request of pdserve and its variants, and what a variant takes more or less."""
    header, rows = ["system"], []
    for scenario in FEATURE_SCENARIOS:
        header += [f"{scenario}: CPU us/req", "difference"]
    for system in summary[FEATURE_SCENARIOS[0]]:
        row = [system]
        for scenario in FEATURE_SCENARIOS:
            base, own = (summary[scenario][name]["cpu_ms_per_request"] * 1e3 for name in (OURS, system))
            row += [f"{own:.0f}", "" if system == OURS else f"{own - base:+.0f}"]
        rows.append(row)
    return header, rows


def remarks(results: Results) -> list[str]:
    """What a reader of the tables has to know about this run."""
    lines = [f"{item.scenario}, {item.system}, round {item.round + 1}: {item.error}" for item in results.failures()]
    marked = sum(not sample.clean for sample in results.samples)
    if marked:
        limit = results.meta["foreign_limit"]
        lines.append(
            f"{marked} of {len(results.samples)} samples had more than {limit} CPUs of foreign load; they count only "
            "where a scenario has no other."
        )
    for system, scenarios in results.noisy().items():
        lines.append(f"no clean sample of {system} in: {', '.join(scenarios)}")
    return lines


def print_report(results: Results, goals: list[Goal]) -> None:
    console = Console(width=None if Console().is_terminal else 200)
    shown = [*tables(results.summary())]
    if results.soak:
        shown.append(("memory over many requests and streams", *soak_rows(results)))
    if goals:
        shown.append((f"goals: ratios to {REFERENCE}", *goal_rows(goals)))
    for title, header, rows in shown:
        table = Table(title=title, title_justify="left")
        for index, name in enumerate(header):
            table.add_column(name, justify="left" if index < 2 else "right", no_wrap=index < 2)
        for row in rows:
            style = {"FAIL": "red", "pass": "green"}.get(row[-1])
            table.add_row(*row, style=style)
        console.print(table)
    for line in remarks(results):
        console.print(line, style="yellow", soft_wrap=True, markup=False)
