"""The tables of published launches are whole, and true of what our recipes render."""

from __future__ import annotations

from tests.docs.launches import DATA, KIMI, OTHERS, launch
from tests.tables import each_row

LAUNCHES = (KIMI, *OTHERS)


@each_row("name", LAUNCHES)
def test_a_reason_stands_where_we_differ(name: str) -> None:
    rows = [row for rows in launch(name).parts.values() for row in rows]
    assert [row for row in rows if row.differs != (row.why is not None)] == []


def test_no_table_is_left_out_of_the_pages() -> None:
    assert {path.stem for path in DATA.iterdir()} == set(LAUNCHES)
