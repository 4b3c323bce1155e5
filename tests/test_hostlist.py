"""Slurm's nodelists: golden lists, everything that is no list, and there and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import PreflightError
from pdserve.plan.slurm_nodes import MOST_NAMES, expand_nodelist, fold_nodelist
from tests.tables import each_row

READ: list[tuple[str, str]] = [
    ("n1", "n1"), ("login", "login"), ("n1,n2", "n1 n2"), ("n[1-3]", "n1 n2 n3"),
    ("n[1-3,5,007-010]", "n1 n2 n3 n5 n007 n008 n009 n010"),
    ("n[98-101]", "n98 n99 n100 n101"), ("n[098-101]", "n098 n099 n100 n101"), ("n[98,099,100]", "n98 n099 n100"),
    ("n[09-10,100]", "n09 n10 n100"), ("n[0-1]", "n0 n1"), ("n[7]", "n7"), ("n[007]", "n007"),
    ("rack[0-1]node[00-01]", "rack0node00 rack0node01 rack1node00 rack1node01"),
    ("r[1-2]s[3,5]t[7-8]", "r1s3t7 r1s3t8 r1s5t7 r1s5t8 r2s3t7 r2s3t8 r2s5t7 r2s5t8"),
    ("n[1-2][3-4]", "n13 n14 n23 n24"), ("n[1-2]-ib", "n1-ib n2-ib"),
    ("[1-2]", "1 2"), ("[01-02]n", "01n 02n"),
    ("a[1-2],b[1,3],c,d-[09-10]", "a1 a2 b1 b3 c d-09 d-10"),
    ("n[999999999999999998-999999999999999999]", "n999999999999999998 n999999999999999999"),
]  # fmt: skip

REFUSED: list[tuple[str, int, str]] = [
    ("", 1, "a name is missing"), (",", 1, "a name is missing"), ("n1,", 4, "a name is missing"),
    (",n1", 1, "a name is missing"), ("n1,,n2", 4, "a name is missing"), ("n[1-3", 2, "a [ that is never closed"),
    ("n[", 2, "a [ that is never closed"), ("n[1,", 2, "a [ that is never closed"),
    ("n[]", 3, "a number is missing"), ("n[,1]", 3, "a number is missing"), ("n[1,,2]", 5, "a number is missing"),
    ("n[1-]", 4, "'-', which no nodelist has"), ("n[1-2-3]", 6, "'-', which no nodelist has"),
    ("n[3-1]", 3, "a range that runs backwards: 3-1"),
    ("n[001-9]", 3, "a range whose ends are padded differently: 001-9"),
    ("n[1-010]", 3, "a range whose ends are padded differently: 1-010"),
    ("n1 n2", 3, "white space"), (" n1", 1, "white space"), ("n1\n", 3, "white space"), ("n[1, 2]", 5, "white space"),
    ("n[٣]", 3, "'٣', which no nodelist has"), ("-w,n1", 1, '"-w" is not the name of a node'),
    ("n1,n[1-2]", 4, "n1 is there twice"), ("n[1,1]", 1, "n1 is there twice"),
    (f"n[0-{MOST_NAMES}]", 3, f"more than {MOST_NAMES} names"),
    ("n[0-999]m[0-999]", 1, f"more than {MOST_NAMES} names"),
    ("a,n[1-1000][1-1000][1-1000]", 3, f"more than {MOST_NAMES} names"),
    (f"n[{'9' * 5000}]", 3, "a number of more than 18 digits"),
]  # fmt: skip


def flattened(lists: list[list[str]]) -> list[str]:
    return [name for names in lists for name in names]


names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,8}[0-9]{0,4}", fullmatch=True)
families = st.builds(
    lambda prefix, first, count, width: [f"{prefix}{n:0{width}}" for n in range(first, first + count)],
    st.sampled_from(["n", "rack1-", "gpu.", "1x", ""]),
    st.integers(0, 1100),
    st.integers(1, 12),
    st.integers(1, 4),
)


def expanded(text: str) -> tuple[str, ...] | None:
    """The names; None where the text is refused."""
    try:
        return expand_nodelist(text)
    except PreflightError:
        return None


@each_row("text, expected", READ)
def test_a_nodelist_is_read(text: str, expected: str) -> None:
    assert expand_nodelist(text) == tuple(expected.split())


@each_row("text, place, what", REFUSED)
def test_what_is_no_nodelist_is_refused_at_its_place(text: str, place: int, what: str) -> None:
    with pytest.raises(PreflightError) as caught:
        expand_nodelist(text, where="SLURM_JOB_NODELIST")
    assert caught.value.what == f"not a list of nodes, at character {place}: {what}"
    assert caught.value.where == "SLURM_JOB_NODELIST"


def test_the_place_is_shown_below_the_list() -> None:
    with pytest.raises(PreflightError) as caught:
        expand_nodelist("rack1,rack[2-3,x]")
    assert caught.value.evidence == ("rack1,rack[2-3,x]", "               ^")


@each_row("text, folded", [
    ("", ""), ("n1", "n1"), ("n1 n2 n3 n5", "n[1-3,5]"), ("n3 n1 n2", "n[3,1-2]"),
    ("n008 n009 n010 n100", "n[008-010,100]"),
    ("n98 n99 n100 n101", "n[98-101]"), ("n09 n10 n100", "n[09-10,100]"), ("a1 a2 b1 a3", "a[1-2],b1,a3"),
    ("n1-ib n2-ib", "n1-ib,n2-ib"), ("login n1 n2", "login,n[1-2]"), ("1 2 3", "[1-3]"),
    ("rack0n0 rack0n1 rack1n0", "rack0n[0-1],rack1n0"),
])  # fmt: skip
def test_names_fold_to_one_bracket_at_the_end(text: str, folded: str) -> None:
    assert fold_nodelist(text.split()) == folded


@each_row("bad", [["n1", "n1"], ["a b"], [""], ["n[1-2]x]"], ["-w"], ["ü1"]])
def test_what_is_no_name_cannot_be_folded(bad: list[str]) -> None:
    with pytest.raises(PreflightError):
        fold_nodelist(bad)


@given(st.lists(names, unique=True, max_size=30) | st.lists(families, max_size=4).map(flattened))
def test_what_was_folded_expands_to_the_same_names(hosts: list[str]) -> None:
    unique = list(dict.fromkeys(hosts))
    if unique:
        assert expand_nodelist(fold_nodelist(unique)) == tuple(unique)


@given(st.text("n019[]-,. \nx", max_size=14) | st.text(max_size=8))
def test_any_text_is_a_list_of_names_or_an_error(text: str) -> None:
    names = expanded(text)
    assert names is None or (names and expand_nodelist(fold_nodelist(names)) == names)
