"""`pdserve report`"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from pdserve.cli.bench.pages import write_page
from pdserve.report.drawing import check_matplotlib
from pdserve.report.page import report_page
from pdserve.report.pictures import pictures
from pdserve.report.rows import read_report


def run(folders: Sequence[Path], out: Path, pictures_folder: Path | None) -> None:
    """Raises PreflightError without matplotlib, StateError for folders without results and files not to be written."""
    check_matplotlib()
    report = read_report(folders)
    drawn = pictures(report)
    write_page(out, report_page(report, drawn), pictures_folder, drawn, option="--out")
    typer.echo(f"{out}: {len(report.rows)} rows, {report.invalid} INVALID, {len(drawn)} pictures")
