"""The table of published launches is whole, and true of what our recipe renders."""

from __future__ import annotations

import pytest

from tests.docs.kimi_launches import Row, parts, same

PARTS = parts()
ROWS = [pytest.param(row, id=f"{part}:{row.name}") for part, rows in PARTS.items() for row in rows]


@pytest.mark.parametrize("row", ROWS)
def test_a_reason_stands_where_we_differ_and_nowhere_else(row: Row) -> None:
    assert row.ours is not None or row.published is not None or row.vllm is not None or row.why, "an empty row"
    assert row.differs == (row.why is not None), row


def test_what_we_set_and_others_do_not_counts_as_a_difference() -> None:
    assert Row("a", "1", None, None, None).differs
    assert Row("a", None, "1", None, None).differs
    assert Row("a", "1", "1", "2", None).differs
    assert not Row("a", "1", "1", None, None).differs


def test_numbers_are_compared_as_numbers() -> None:
    assert same("0.9", "0.90")
    assert same("1200.0", "1200")
    assert not same("fp8", "bf16")
    assert not same("1", None)


def test_every_part_of_the_launch_has_rows_of_ours() -> None:
    assert all(any(row.ours is not None for row in rows) for rows in PARTS.values())
