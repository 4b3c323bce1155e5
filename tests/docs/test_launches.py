"""The tables of published launches are whole, and true of what our recipes render."""

from __future__ import annotations

import pytest

from tests.docs.launches import DATA, KIMI, OTHERS, Row, launch, same

LAUNCHES = (KIMI, *OTHERS)
ROWS = [
    pytest.param(row, id=f"{name}:{part}:{row.name}")
    for name in LAUNCHES
    for part, rows in launch(name).parts.items()
    for row in rows
]


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


def test_mappings_are_compared_as_mappings() -> None:
    assert same('{"a": 1,"b":2}', '{"b": 2, "a": 1.0}')
    assert not same('{"a": 1}', '{"a": 2}')


@pytest.mark.parametrize("name", LAUNCHES)
def test_every_part_of_a_launch_has_rows_of_ours(name: str) -> None:
    assert all(any(row.ours is not None for row in rows) for rows in launch(name).parts.values())


def test_no_table_is_left_out_of_the_pages() -> None:
    assert {path.stem for path in DATA.iterdir()} == set(LAUNCHES)
