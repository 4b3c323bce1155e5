"""Writes the results section of README.md from results.json and soak.json beside it.

python -m benchmarks.proxy.readme
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.proxy.goals import judge
from benchmarks.proxy.results import Results
from benchmarks.proxy.table import Row, feature_rows, goal_rows, remarks, soak_rows, tables

BEGIN, END = "<!-- results: written by benchmarks.proxy.readme -->", "<!-- end of results -->"


def fill_in(readme: Path, folder: Path) -> None:
    """ValueError: the README has lost its marks."""
    text = readme.read_text()
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"{readme} has no marks for the results")
    readme.write_text(f"{before}{BEGIN}\n\n{section(folder)}\n{END}{after}")


def section(folder: Path) -> str:
    results = Results.read(folder / "results.json")
    if (folder / "soak.json").exists():
        results.soak = Results.read(folder / "soak.json").soak
    meta = results.meta
    versions = ", ".join(f"{name} {version}" for name, version in meta["versions"].items())
    features = ", ".join(meta["pdserve_features"]) or "none switched on"
    parts = [
        f"Size `{meta['size']}`, {meta['rounds']} rounds of {meta['visits']} visits, {meta['started'][:10]}. "
        f"{meta['cpu']}, {meta['cpus']} CPUs, kernel {meta['kernel']}, Python {meta['python']}; {versions}. "
        f"pdserve's features: {features}; {'compiled' if meta.get('pdserve_compiled') else 'interpreted'}.",
        "![The systems side by side](results.png)",
        "### Goals",
        markdown(*goal_rows(judge(results.samples, results.soak))),
    ]
    for title, header, rows in tables(results.summary()):
        parts += [f"### {title.capitalize()}", markdown(header, rows)]
    if results.soak:
        parts += ["### Memory over many requests and streams", markdown(*soak_rows(results))]
    if (folder / "features.json").exists():
        parts += [
            "### What each feature costs",
            markdown(*feature_rows(Results.read(folder / "features.json").summary())),
        ]
    parts += [f"- {line}" for line in remarks(results)]
    return "\n\n".join(parts) + "\n"


def markdown(header: Row, rows: list[Row]) -> str:
    lines = [header, ["---"] * 2 + ["---:"] * (len(header) - 2), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    here = Path(__file__).parent
    fill_in(here / "README.md", here)
