"""results.png: the systems side by side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.proxy.goals import STREAMS
from benchmarks.proxy.results import Results

BODIES = ("body-1kB", "body-100kB", "body-1MB")
PANELS = (
    ("CPU per request, ms (log)", ("requests", *BODIES), "cpu_ms_per_request", True),
    ("Requests/s (log)", ("requests", *BODIES), "requests_per_s", True),
    ("CPU s per 1000 relayed chunks", STREAMS, "cpu_s_per_1000_chunks", False),
    ("p99 delay of a chunk, ms (log)", STREAMS, "delay_p99_ms", True),
    ("TTFT p50 added, ms (log)", ("ttft", "ttft-prefill"), "added_ttft_p50_ms", True),
    ("Resident memory, MiB, 512 streams", STREAMS[2:], "rss_streams_mib", False),
)
COLOURS = {
    "direct": "#9aa0a6",
    "toy": "#d98c5f",
    "vllm-router": "#5b8bd0",
    "pdserve-interpreted": "#a5d6a7",
    "pdserve": "#3d9970",
}


def plot(results: Results, path: Path, report: Callable[[str], None]) -> None:
    """Says so and does nothing where matplotlib is not installed."""
    try:
        import matplotlib  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        report("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    summary = results.summary()
    systems = list(dict.fromkeys(sample.system for sample in results.samples))
    figure, axes = pyplot.subplots(2, 3, figsize=(16, 8.5), constrained_layout=True)
    for axis, (title, scenarios, name, log) in zip(axes.flat, PANELS, strict=True):
        shown = [scenario for scenario in scenarios if scenario in summary]
        drawn = [system for system in systems if any(name in summary[item].get(system, {}) for item in shown)]
        width = 0.8 / max(1, len(drawn))
        for index, system in enumerate(drawn):
            heights = [summary[scenario].get(system, {}).get(name, 0.0) for scenario in shown]
            places = [place + (index - (len(drawn) - 1) / 2) * width for place in range(len(shown))]
            bars = axis.bar(places, heights, width * 0.95, label=system, color=COLOURS.get(system))
            axis.bar_label(bars, fmt="{:.3g}", fontsize=7, padding=1)
        axis.set_title(title, fontsize=11)
        axis.set_xticks(
            range(len(shown)), [item.replace("streams-", "").replace("-", "\n") for item in shown], fontsize=8
        )
        if log and drawn:
            axis.set_yscale("log")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.25)
        axis.set_axisbelow(True)
        if drawn:
            axis.legend(fontsize=7, frameon=False)
    meta = results.meta
    figure.suptitle(
        f"One core a proxy, {meta['cpu']}, medians of {meta['rounds'] * meta['visits']} visits ({meta['size']})",
        fontsize=11,
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
