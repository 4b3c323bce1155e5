"""Writes a page and its pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pdserve.errors import StateError
from pdserve.report.drawing import Picture


def write_page(out: Path, text: str, pictures_folder: Path | None, drawn: Sequence[Picture], *, option: str) -> None:
    """`option`: of the command line, that names the page. Raises StateError."""
    try:
        out.write_text(text, encoding="utf-8")
        if pictures_folder is not None:
            pictures_folder.mkdir(parents=True, exist_ok=True)
            for each in drawn:
                each.save(pictures_folder)
    except OSError as error:
        raise StateError(
            "the page cannot be written",
            where=str(error.filename or out),
            cause=error.strerror or str(error),
            todo=f"name a file in a folder that you can write to: {option} FILE",
        ) from None
