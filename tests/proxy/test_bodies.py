"""Properties of the bodies that the legs get: the client's bytes, but for the members that are ours to cut or add."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.pd.errors import ApiError
from pdserve.pd.http.pieces import LARGE, Pieces
from pdserve.pd.requests import member_spans
from pdserve.pd.requests.body import Body
from pdserve.pd.requests.dialects import CHAT, COMPLETIONS, DIALECTS, INTERNAL, NOT_FOR_PREFILL, Dialect
from pdserve.pd.requests.member_spans import quoted_name, spans_of
from tests.tables import each_row

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from([*INTERNAL, *NOT_FOR_PREFILL, "max_tokens", "max_completion_tokens", "prompt", "model"])
BODIES = st.dictionaries(NAMES | st.text(), JSON, max_size=8)
BLANKS = st.sampled_from(["", " ", "\n", "\t ", "\r\n"])
PLAIN = st.sampled_from(["a", "b", "c", "stream"])
TRANSFER = b'{"transfer_id": "ours"}'
DIALECT = st.sampled_from(DIALECTS)


def escaped(text: str) -> str:
    """A JSON string in which every character is escaped."""
    units = text.encode("utf-16-be", "surrogatepass")
    return '"' + "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2)) + '"'


def spelled(members: dict[str, Any], before: str = "", after: str = "") -> bytes:
    """A JSON object with blanks wherever they may be."""
    inner = f"{after},{before}".join(
        f"{json.dumps(name)}{after}:{before}{json.dumps(value)}" for name, value in members.items()
    )
    return f"{after}{{{before}{inner}{after}}}{before}".encode()


def clean(value: Any) -> Any:
    """vllm_xargs without the names that are internal."""
    return {name: inner for name, inner in value.items() if name not in INTERNAL} if isinstance(value, dict) else value


@given(BODIES, DIALECT)
def test_decode_gets_the_clients_members_and_our_transfer(body: dict[str, Any], dialect: Dialect) -> None:
    leg = json.loads(bytes(dialect.decode_body(Body(spelled(body)), TRANSFER)))
    expected = {name: value for name, value in body.items() if name not in INTERNAL}
    assert leg == expected | {"kv_transfer_params": {"transfer_id": "ours"}}


@given(BODIES, BLANKS, BLANKS)
def test_decode_gets_the_clients_bytes(body: dict[str, Any], before: str, after: str) -> None:
    ours = {name: value for name, value in body.items() if name not in INTERNAL}
    raw = spelled(ours, before, after)
    leg = bytes(COMPLETIONS.decode_body(Body(raw), TRANSFER))
    end = raw.rindex(b"}")
    kept = raw[:end].rstrip(b" \t\r\n") if ours else raw[:end]
    comma = b"," if ours else b""
    assert leg == kept + comma + b'"kv_transfer_params":' + TRANSFER + raw[len(kept) :]


@given(BODIES)
def test_one_engine_gets_exactly_what_the_client_sent(body: dict[str, Any]) -> None:
    raw = spelled({name: value for name, value in body.items() if name not in INTERNAL}, " ")
    assert COMPLETIONS.whole_body(Body(raw)) == raw


@given(BODIES, st.sampled_from([CHAT, COMPLETIONS]))
def test_prefill_always_is_one_token_that_only_length_can_end(body: dict[str, Any], dialect: Dialect) -> None:
    leg = json.loads(bytes(dialect.prefill_body(Body(spelled(body)), TRANSFER)))
    assert (leg["max_tokens"], leg["stream"], leg["ignore_eos"]) == (1, False, True)
    if dialect is CHAT:
        assert leg.get("max_completion_tokens", 1) == 1
    assert leg["kv_transfer_params"] == {"transfer_id": "ours"}
    assert not NOT_FOR_PREFILL & leg.keys()


@given(BODIES, DIALECT)
def test_prefill_keeps_every_member_that_it_need_not_change(body: dict[str, Any], dialect: Dialect) -> None:
    leg = json.loads(bytes(dialect.prefill_body(Body(spelled(body)), TRANSFER)))
    ours = {*NOT_FOR_PREFILL, *INTERNAL, *dialect.prefill_fields, *dialect.limits}
    assert {n: v for n, v in leg.items() if n not in ours} == {n: v for n, v in body.items() if n not in ours}


def test_a_large_body_is_copied_into_no_leg() -> None:
    """And is the same byte for byte as one that is put together."""
    raw = json.dumps({"prompt": "x" * LARGE, "kv_transfer_params": {"smuggled": True}, "n": 1.0}).encode()
    body = Body(raw)
    for leg in (COMPLETIONS.decode_body(body, TRANSFER), COMPLETIONS.prefill_body(body, TRANSFER)):
        assert isinstance(leg, Pieces)
        assert sum(len(part) for part in leg.parts if isinstance(part, memoryview) and part.obj is raw) > LARGE
        assert len(leg) == len(bytes(leg))
    small = Body(raw.replace(b"x" * LARGE, b"x"))
    expected = bytes(COMPLETIONS.decode_body(small, TRANSFER)).replace(b'"x"', b'"' + b"x" * LARGE + b'"')
    assert bytes(COMPLETIONS.decode_body(body, TRANSFER)) == expected


@given(st.sampled_from(sorted(INTERNAL)), JSON, DIALECT)
def test_no_spelling_of_an_internal_name_gets_through(name: str, value: object, dialect: Dialect) -> None:
    body = Body(f"{{{escaped(name)}: {json.dumps(value)}}}".encode())
    assert dialect.whole_body(body) == b"{}"
    assert json.loads(bytes(dialect.decode_body(body, TRANSFER))) == {"kv_transfer_params": {"transfer_id": "ours"}}


@given(BODIES)
def test_no_internal_name_gets_through_in_extra_arguments(extra: dict[str, Any]) -> None:
    body = Body(json.dumps({"prompt": "a", "vllm_xargs": extra}).encode())
    for leg in (COMPLETIONS.whole_body(body), COMPLETIONS.decode_body(body, TRANSFER)):
        assert json.loads(bytes(leg))["vllm_xargs"] == clean(extra)


VALUES = st.sampled_from(["1", "12", '"1"', "[1,2]", "1.0", " 1", "null"])


@given(st.lists(st.tuples(PLAIN, VALUES, st.booleans()), min_size=1, max_size=5))
def test_a_name_that_comes_twice_is_refused_however_it_is_spelled(members: list[tuple[str, str, bool]]) -> None:
    inner = ",".join(f"{escaped(name) if hide else json.dumps(name)}:{value}" for name, value, hide in members)
    raw = f"{{{inner}}}".encode()
    names = [name for name, _, _ in members]
    if len(set(names)) == len(names):
        assert {name: Body(raw).get(name) for name in names} == json.loads(raw)
    else:
        with pytest.raises(ApiError, match="twice"):
            Body(raw)


@given(st.binary(max_size=64))
def test_what_is_no_json_object_is_a_400(raw: bytes) -> None:
    try:
        parsed = json.loads(raw.decode())
    except ValueError:
        parsed = None
    if isinstance(parsed, dict):
        assert json.loads(bytes(COMPLETIONS.whole_body(Body(raw)))) == parsed
    else:
        with pytest.raises(ApiError) as refused:
            Body(raw)
        assert refused.value.status == 400


@given(BODIES, DIALECT)
def test_every_body_can_be_judged(body: dict[str, Any], dialect: Dialect) -> None:
    field = dialect.needs_single_engine(Body(spelled(body)))
    if field is None:
        assert body.get("n", 1) in (1, None)
        assert body.get("prompt_logprobs") is None
    else:
        assert field in body or field in ("messages", "prompt")


# --- of a larger body the largest value is not looked at again: a name that comes twice is seen all the same


FILL = 20_000
HARD_NAMES = st.sampled_from(["a", "b", "large", ", ", ": ", "]", "}", '"', "\\", "ü"])
TEXTS = st.text(st.sampled_from(',: a"\\[]{}ü'), max_size=8)
HARD_VALUES = st.recursive(
    st.sampled_from([1, None, "", 12.5]) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(HARD_NAMES, inner, max_size=3),
    max_leaves=6,
)
SEPARATORS = st.sampled_from([(",", ":"), (", ", ": "), (", ", ":"), (" , ", " : ")])


def names(raw: bytes) -> list[str]:
    """Of its members, as often as they come."""
    return [name for name, _ in json.loads(raw, object_pairs_hook=lambda pairs: pairs)]


def judged_right(raw: bytes) -> bool:
    """Tell whether it is taken exactly if no name comes twice in it, each value from its own place."""
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
    members=st.lists(st.tuples(HARD_NAMES, HARD_VALUES), max_size=4),
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


@each_row("place, fill", [(0, 9), (8, 9), (0, FILL), (8, FILL)])
def test_shorter_separators_do_not_make_up_for_a_name_that_comes_twice(place: int, fill: int) -> None:
    """Its second coming is as long as the blanks that are missing behind the commas."""
    members = [f'"{name}": 1' for name in "abcdefg"]
    members.insert(place, f'"large": "{"x" * fill}"')
    members.insert(4, members[2])
    raw = f"{{{','.join(members)}}}".encode()
    assert len(raw) == len(json.dumps(json.loads(raw)))
    with pytest.raises(ApiError, match="comes twice"):
        Body(raw)


@each_row(
    "raw, members, compared",
    [
        (b'{"a" : 1}', {"a": b"1", "b": b"2"}, {}),
        (b'{"a":"%b","b":1}' % (b"x" * FILL), {"a": b'"%b"' % (b"y" * FILL), "b": b"1"}, {"a": 6}),
    ],
)
def test_what_was_read_is_compared_with_its_place(
    raw: bytes, members: dict[str, bytes], compared: dict[str, int]
) -> None:
    with pytest.raises(ApiError, match="comes twice"):
        spans_of(raw, {name: msgspec.Raw(value) for name, value in members.items()}, compared)


def test_names_of_clients_fill_no_memory() -> None:
    quoted_name("n" * 65)
    assert "n" * 65 not in member_spans._QUOTED
    for number in range(2000):
        assert quoted_name(f"name-{number}") == b'"name-%d"' % number
    assert len(member_spans._QUOTED) <= 1024
