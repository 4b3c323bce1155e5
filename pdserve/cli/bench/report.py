"""`pdserve report`"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from pdserve.errors import StateError
from pdserve.report.page import page
from pdserve.report.pictures import check_matplotlib, pictures
from pdserve.report.rows import read_report


def run(folders: Sequence[Path], out: Path, pictures_folder: Path | None) -> None:
    """Raises PreflightError without matplotlib, StateError for folders without results and files not to be written."""
    check_matplotlib()
    report = read_report(folders)
    drawn = pictures(report.rows)
    text = page(report, [{"title": each.title, "note": each.note, "svg": each.svg} for each in drawn])
    try:
        out.write_text(text, encoding="utf-8")
        if pictures_folder is not None:
            pictures_folder.mkdir(parents=True, exist_ok=True)
            for each in drawn:
                each.save(pictures_folder)
    except OSError as error:
        raise StateError(
            "the report cannot be written",
            where=str(error.filename or out),
            cause=error.strerror or str(error),
            todo="name a file in a folder that you can write to: --out FILE",
        ) from None
    typer.echo(f"{out}: {len(report.rows)} rows, {report.invalid} INVALID, {len(drawn)} pictures")
