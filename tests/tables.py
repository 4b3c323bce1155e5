"""A table in one test: every row is tried, and the failure has each row that fails."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

Test = Callable[..., None]


def each_row(names: str, table: Iterable[Any]) -> Callable[[Test], Test]:
    """Take what `pytest.mark.parametrize` takes, and make one test: for rows that are quick and need no fixture of
    their own. A row has a folder of its own below `tmp_path`, and what it patches is undone after it."""
    wanted = [name.strip() for name in names.split(",")]
    values = [row if len(wanted) > 1 else (row,) for row in table]
    assert values, f"no row of {names}"

    def decorated(test: Test) -> Test:
        @functools.wraps(test)
        def tried(**fixtures: Any) -> None:
            failures = [failure for number in range(len(values)) if (failure := attempt(number, fixtures))]
            if failures:
                raise BaseExceptionGroup(f"{len(failures)} of {len(values)} rows fail", failures)

        def attempt(number: int, fixtures: dict[str, Any]) -> BaseException | None:
            row = dict(zip(wanted, values[number], strict=True))
            with pytest.MonkeyPatch.context() as patched:
                try:
                    test(**row, **_of_one_row(fixtures, number, patched))
                except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 (the other rows run too)
                    error.add_note(f"in row {number}: {row}")
                    return error
            return None

        signature = inspect.signature(test)
        left = [parameter for name, parameter in signature.parameters.items() if name not in wanted]
        tried.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return tried

    return decorated


def _of_one_row(fixtures: dict[str, Any], number: int, patched: pytest.MonkeyPatch) -> dict[str, Any]:
    own = dict(fixtures)
    if isinstance(folder := own.get("tmp_path"), Path):
        own["tmp_path"] = folder / f"row-{number}"
        own["tmp_path"].mkdir()
    if "monkeypatch" in own:
        own["monkeypatch"] = patched
    if "capsys" in own:
        own["capsys"].readouterr()
    return own
