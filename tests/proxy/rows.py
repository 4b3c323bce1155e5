"""A table in one test: all of its rows are tried, and the failure names each that is bad."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Test = Callable[..., None]


def each(names: str, rows: Iterable[Any] | Mapping[str, Any]) -> Callable[[Test], Test]:
    """As pytest.mark.parametrize, for rows that start nothing of their own: a fixture is made once for all of them. The
    keys of a mapping name its rows."""
    arguments = [name.strip() for name in names.split(",")]
    named = rows.items() if isinstance(rows, Mapping) else ((None, row) for row in rows)
    table = [(row if name is None else name, row if len(arguments) > 1 else (row,)) for name, row in named]
    assert table

    def decorate(test: Test) -> Test:
        @functools.wraps(test, updated=())
        def all_rows(**fixtures: Any) -> None:
            wrong: list[Exception] = []
            for name, values in table:
                try:
                    test(**fixtures, **dict(zip(arguments, values, strict=True)))
                except Exception as error:  # noqa: BLE001  (whatever a row ends with)
                    error.add_note(f"row: {name!r:.200}")
                    wrong.append(error)
            if wrong:
                raise ExceptionGroup(f"{len(wrong)} of {len(table)} rows", wrong)

        signature = inspect.signature(test)
        kept = [value for name, value in signature.parameters.items() if name not in arguments]
        all_rows.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        if marks := getattr(test, "pytestmark", None):
            all_rows.pytestmark = marks  # type: ignore[attr-defined]
        return all_rows

    return decorate
