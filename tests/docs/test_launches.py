"""The tables of published launches are whole, and true of what our recipes render."""

from __future__ import annotations

from tests.docs.launches import DATA, KIMI, OTHERS, Row, launch, same
from tests.tables import each_row

LAUNCHES = (KIMI, *OTHERS)


@each_row("name", LAUNCHES)
def test_a_reason_stands_where_we_differ(name: str) -> None:
    rows = [row for rows in launch(name).parts.values() for row in rows]
    assert [row for row in rows if row.differs != (row.why is not None)] == []


def test_what_one_side_alone_sets_is_a_difference() -> None:
    assert Row("a", "1", None, None, None).differs
    assert Row("a", None, "1", None, None).differs
    assert Row("a", "1", "1", "2", None).differs
    assert not Row("a", "1", "1", None, None).differs


@each_row("left, right, equal", [
    ("0.9", "0.90", True), ("1200.0", "1200", True), ("fp8", "bf16", False), ("1", None, False),
    ('{"a": 1,"b":2}', '{"b": 2, "a": 1.0}', True), ('{"a": 1}', '{"a": 2}', False),
])  # fmt: skip
def test_numbers_and_mappings_are_compared_by_value(left: str, right: str | None, equal: bool) -> None:
    assert same(left, right) is equal


def test_no_table_is_left_out_of_the_pages() -> None:
    assert {path.stem for path in DATA.iterdir()} == set(LAUNCHES)
