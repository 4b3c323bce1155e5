"""Of a larger body the largest value is not looked at again: a name that comes twice is seen all the same."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.pd.errors import ApiError
from pdserve.pd.requests import member_spans
from pdserve.pd.requests.body import Body
from pdserve.pd.requests.member_spans import quoted_name, spans_of
from tests.proxy.rows import each

FILL = 20_000
NAMES = st.sampled_from(["a", "b", "large", ", ", ": ", "]", "}", '"', "\\", "ü"])
TEXTS = st.text(st.sampled_from(',: a"\\[]{}ü'), max_size=8)
VALUES = st.recursive(
    st.sampled_from([1, None, "", 12.5]) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
SEPARATORS = st.sampled_from([(",", ":"), (", ", ": "), (", ", ":"), (" , ", " : ")])


def names(raw: bytes) -> list[str]:
    """Of its members, as often as they come."""
    return [name for name, _ in json.loads(raw, object_pairs_hook=lambda pairs: pairs)]


def judged_right(raw: bytes) -> bool:
    """Whether it is taken exactly if no name comes twice in it, each value from its own place."""
    come = names(raw)
    try:
        body = Body(raw)
    except ApiError as refused:
        return "comes twice" in refused.message and len(set(come)) < len(come)
    values: dict[str, Any] = json.loads(raw)
    return len(set(come)) == len(come) and all(
        json.loads(raw[slice(*body.place(name))]) == value for name, value in values.items()
    )


@given(
    members=st.lists(st.tuples(NAMES, VALUES), max_size=4),
    at=st.integers(0, 4),
    large=st.sampled_from(["text", "list", "object"]),
    separators=SEPARATORS,
)
def test_any_object_with_a_large_value(
    members: list[tuple[str, Any]], at: int, large: str, separators: tuple[str, str]
) -> None:
    comma, colon = separators
    value = {"text": "x" * FILL, "list": ["x" * FILL, 1], "object": {"large": "x" * FILL, "b": 1}}[large]
    members.insert(at, ("large", value))
    spelled = [f"{json.dumps(name)}{colon}{json.dumps(value, ensure_ascii=False)}" for name, value in members]
    assert judged_right(f"{{{comma.join(spelled)}}}".encode())


X = "x" * FILL


@each(
    "raw",
    [
        f'{{"a": 1, "large": "", "large": "{X}", "b": 2}}',
        f'{{"a": 1, "large": "{X}", "large": "", "b": 2}}',
        f'{{"a": 1, "large": "{X}", "b": 2, "large": "{X}"}}',
        f'{{"a": 1, "large": [1, "large"], "large": ["{X}"], "b": 2}}',
        f'{{"a": 1, "large": {{"b": 2}}, "b": 2, "large": {{"b": "{X}"}}}}',
        f'{{"a": 1, "a": 2, "large": "{X}"}}',
        f'{{"large": "{X}", "a": 1, "a": 2}}',
        f'{{"l\\u0061rge": 1, "large": "{X}"}}',
        f'{{"large": "{X}", "l\\u0061rge": 1}}',
    ],
)
def test_a_name_that_comes_twice_is_refused(raw: str) -> None:
    assert len(set(names(raw.encode()))) < len(names(raw.encode()))
    with pytest.raises(ApiError, match="comes twice"):
        Body(raw.encode())
    assert judged_right(raw.replace('"large"', '"lange"', 1).replace('"a"', '"e"', 1).encode())


@each("place, fill", [(0, 9), (8, 9), (0, FILL), (8, FILL)])
def test_shorter_separators_do_not_make_up_for_a_name_that_comes_twice(place: int, fill: int) -> None:
    """Its second coming is as long as the blanks that are missing behind the commas."""
    members = [f'"{name}": 1' for name in "abcdefg"]
    members.insert(place, f'"large": "{"x" * fill}"')
    members.insert(4, members[2])
    raw = f"{{{','.join(members)}}}".encode()
    assert len(raw) == len(json.dumps(json.loads(raw)))
    with pytest.raises(ApiError, match="comes twice"):
        Body(raw)


def test_a_large_value_that_was_cut_out_is_compared_with_its_place() -> None:
    raw = f'{{"large":"{X}","b":1}}'.encode()
    other = {"large": msgspec.Raw(b'"%b"' % (b"y" * FILL)), "b": msgspec.Raw(b"1")}
    place = raw.index(b'"x')
    assert len(spans_of(raw, other, {"large": place})) == 2
    for compared in ({"b": 1}, {"large": place + 1}):
        with pytest.raises(ApiError, match="comes twice"):
            spans_of(raw, other, compared)


def test_members_beyond_the_end_of_the_object_are_none() -> None:
    one, two = msgspec.Raw(b"1"), msgspec.Raw(b"2")
    for raw, members in ((b'{"a" : 1}', {"a": one, "b": two}), (b'{"a" : 1 , "b":2}', {"a": one})):
        with pytest.raises(ApiError, match="comes twice"):
            spans_of(raw, members, {})


def test_the_longest_name_is_taken_and_one_more_character_is_not() -> None:
    for spelled in ('{"%s":1}', '{"%s" : 1}', '{"a" : "' + X + '", "%s":1}'):
        assert "n" * 1024 in Body((spelled % ("n" * 1024)).encode())
        with pytest.raises(ApiError, match="a name of"):
            Body((spelled % ("n" * 1025)).encode())


def test_names_of_clients_fill_no_memory() -> None:
    quoted_name("n" * 65)
    assert "n" * 65 not in member_spans._QUOTED
    for number in range(2000):
        assert quoted_name(f"name-{number}") == b'"name-%d"' % number
    assert len(member_spans._QUOTED) <= 1024
