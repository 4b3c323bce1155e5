"""Large bodies are read in steps, to the same end as small ones, and nothing is made for each of their items."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.pd.errors import ApiError
from pdserve.pd.requests.body import EASY_BYTES, FEW_BYTES, Body, members_at_once
from pdserve.pd.requests.dialects import COMPLETIONS
from pdserve.pd.requests.scan import MAX_BRACKETS, MAX_DEPTH, MAX_MEMBERS, Scan
from tests.proxy.rows import each

TRANSFER = b'{"transfer_id": "ours"}'
SLICE = 4096
"""Bytes of the first slice that is looked at."""
TEXT = st.text(st.sampled_from('a"\\{}[]:,é\n '), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


def scanned(raw: bytes) -> Body:
    scan = Scan(raw)
    while not scan.step():
        pass
    return Body(raw, scan)


@given(st.dictionaries(TEXT, JSON, max_size=6), st.integers(SLICE - 40, SLICE + 8), st.sampled_from(["[{}]", '"{}"']))
def test_steps_find_the_members_that_a_reader_of_json_finds(body: dict[str, Any], size: int, around: str) -> None:
    """Wherever the border between two slices falls."""
    body = {"long": None, **body, "behind": 1}
    spelled = json.dumps(body, ensure_ascii=False)
    filler = around.replace("{}", '"%s", 1' % ("x" * size) if around[0] == "[" else "x" * size)
    raw = spelled.replace('"long": null', f'"long": {filler}', 1).encode()
    read, once = scanned(raw), Body(raw)
    assert {name: bytes(value) for name, value in read.members.items()} == {
        name: bytes(value) for name, value in once.members.items()
    }
    assert bytes(COMPLETIONS.decode_body(read, TRANSFER)) == bytes(COMPLETIONS.decode_body(once, TRANSFER))


@given(JSON, st.integers(SLICE - 60, SLICE + 4))
def test_steps_find_the_end_of_any_value_at_any_border(value: Any, size: int) -> None:
    raw = f'{{"a": ["{"x" * size}", {json.dumps(value)}], "b": {json.dumps(value)} , "c": 1}}'.encode()
    body = scanned(raw)
    assert list(body.members) == ["a", "b", "c"]
    assert json.loads(bytes(body.members["a"]))[1] == value
    assert json.loads(bytes(body.members["b"])) == value


@each(
    "raw",
    [
        b"",
        b"[1]",
        b'{"a": 1',
        b'{"a": [1, 2}',
        b'{"a": "b}',
        b'{"a": "b\\"}',
        b'{"a": 1,}',
        b'{"a" 1}',
        b'{"a": 1} x',
        b'{"a": }',
        b'{"a": NaN}',
        b'{"a": 1, "\\u0061": 2}',
        b'{"a": "\xff"}',
        b'{"a": "\xc3',
        b'{"' + b"n" * 2000 + b'": 1}',
        b'{"a": ' + b"1" * 5000 + b"}",
        b'{"a": ' + b"[" * (2 * MAX_DEPTH) + b"]" * (2 * MAX_DEPTH) + b"}",
        b'{"a": ' + b"[" * 1_000_000,
        b'{"a": [' + b"[]," * MAX_BRACKETS + b"1]}",
    ],
)
def test_steps_refuse_what_is_no_object_that_an_engine_may_get(raw: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        scanned(raw)
    assert refused.value.status == 400


@each("read", [Body, scanned])
def test_an_object_of_very_many_members_is_refused(read: Any) -> None:
    def members(count: int) -> bytes:
        return json.dumps({str(index): index for index in range(count)}).encode()

    assert len(read(members(MAX_MEMBERS)).members) == MAX_MEMBERS
    for count in (MAX_MEMBERS + 1, FEW_BYTES // 15):
        with pytest.raises(ApiError, match=f"more than {MAX_MEMBERS} members"):
            read(members(count))


@given(
    st.dictionaries(TEXT, JSON, max_size=6),
    st.lists(st.tuples(st.sampled_from(["messages", "prompt", "tools", "other"]), st.booleans()), max_size=5),
    st.sampled_from(["[{}]", '"{}"', '{{"messages": "{}"}}', '{{"x": {{"prompt": ["{}"]}}}}']),
)
def test_members_read_at_once_are_those_of_the_whole(
    body: dict[str, Any], large: list[tuple[str, bool]], around: str
) -> None:
    """Names may come twice, inside of values too, spelled in two ways, before and behind their own place."""
    value = (
        around.replace("{}", "1, " * 3000 + "1" if around == "[{}]" else "x" * 9000)
        .replace("{{", "{")
        .replace("}}", "}")
    )
    members = [f"{json.dumps(name)}: {json.dumps(inner)}" for name, inner in body.items()]
    members += [
        f'"{chr(92)}u{ord(name[0]):04x}{name[1:]}" : {value}' if odd else f'"{name}":{value}' for name, odd in large
    ]
    raw = ("{" + ",".join(members) + "}").encode()
    scanned_members = members_at_once(raw)
    if scanned_members is None:
        return
    try:
        once = Body(raw)
    except ApiError:
        with pytest.raises(ApiError):
            Body(raw, members=scanned_members)
        return
    assert list(scanned_members.values) == list(once.members)
    assert {name: bytes(value) for name, value in scanned_members.values.items()} == {
        name: bytes(value) for name, value in once.members.items()
    }
    read = Body(raw, members=scanned_members)
    assert bytes(COMPLETIONS.decode_body(read, TRANSFER)) == bytes(COMPLETIONS.decode_body(once, TRANSFER))


def test_a_member_inside_of_another_one_is_not_taken_for_it() -> None:
    """Its name and its whole value stand in the value of one before it: documents that quote the conversation."""
    turns = json.dumps([{"role": "user", "content": "x" * 5000}]).encode()
    raw = b'{"documents": [{"messages": %b}], "messages": %b, "user": "%b"}' % (turns, turns, b"z" * 8000)
    assert members_at_once(raw) is None
    assert list(scanned(raw).members) == ["documents", "messages", "user"]


@each("name", [b"a" * 1_000_000, b"\\n" * 500_000, b"\\u0041" * 160_000])
@each("colon", [b":", b" :"])
def test_a_very_long_name_is_refused_before_anything_is_compared_with_it(name: bytes, colon: bytes) -> None:
    raw = b'{"prompt": "hi", "%b"%b1}' % (name, colon)
    with pytest.raises(ApiError, match="a name of"):
        Body(raw, members=members_at_once(raw))
    with pytest.raises(ApiError, match="a name of"):
        scanned(raw)


def test_a_conversation_of_a_megabyte_is_read_at_once() -> None:
    """Whatever is in its messages: nothing is made of that."""
    code = 'def f(x: int) -> str:\n    return {"a": x, "b": "messages"}  # "prompt": \\ \n' * 10
    turns = [{"role": "user", "content": code}, {"role": "assistant", "content": code}] * 500
    tools = [{"type": "function", "function": {"name": f"f{number}", "parameters": {}}} for number in range(200)]
    raw = json.dumps({"model": "m", "messages": turns, "tools": tools, "max_tokens": 4}, indent=1).encode()
    assert 700_000 < len(raw) < EASY_BYTES
    members = members_at_once(raw)
    assert members is not None
    values = members.values
    assert list(values) == ["model", "messages", "tools", "max_tokens"]
    assert json.loads(bytes(values["messages"])) == turns
    assert Body(raw, members=members).length("tools") == len(bytes(values["tools"]))


@each(
    "raw",
    [
        b"{" + b",".join(b'"%d":1' % number for number in range(100_000)) + b"}",
        b'{"prompt": "%b", "prompt": "%b"}' % (b"x" * 9000, b"x" * 9000),
        b'{"x": {"prompt": "%b"}, "prompt": "%b"}' % (b"x" * 9000, b"x" * 9000),
        b'{"prompt": "' + b"x" * EASY_BYTES + b'"}',
    ],
)
def test_what_takes_long_or_is_not_sure_is_read_in_steps(raw: bytes) -> None:
    assert members_at_once(raw) is None


@each(
    "raw, message",
    [
        (b"[%b]" % (b"1," * 9000 + b"1"), "must be a JSON object"),
        (b'{"prompt": "%b' % (b"x" * 20_000), "not valid JSON"),
        (b'{"prompt": "%b", "a": "\xff"}' % (b"x" * 20_000), "not valid JSON"),
        (b'{"prompt": [%b NaN]}' % (b"1," * 9000), "not valid JSON"),
        (b'{"prompt": %b}' % (b"[" * 20_000 + b"]" * 20_000), "nested too deeply"),
        (b'{"prompt": "%b", %b "z": 1}' % (b"x" * 20_000, b"".join(b'"%d":1,' % n for n in range(1500))), "more than"),
    ],
)
def test_what_is_read_at_once_is_refused_as_in_steps(raw: bytes, message: str) -> None:
    with pytest.raises(ApiError, match=message) as refused:
        Body(raw, members=members_at_once(raw))
    assert refused.value.status == 400


@each("prompt", [b"[" + b"1," * 2_000_000 + b"1]", b'["' + b"x" * 4_000_000 + b'"]'])
@each("name", ["prompt", "stop"])
def test_what_is_looked_at_in_a_large_body_takes_a_small_part_of_its_memory(name: str, prompt: bytes) -> None:
    """And it is split, for it is one prompt; another large field is an engine's to judge."""
    raw = b'{"%b": %b, "max_tokens": 4}' % (name.encode(), prompt)
    tracemalloc.start()
    body = scanned(raw)
    field = COMPLETIONS.needs_single_engine(body)
    routed, begin, end = COMPLETIONS.prompt(body)
    legs = [COMPLETIONS.prefill_body(body, TRANSFER), COMPLETIONS.decode_body(body, TRANSFER)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert field == (None if name == "prompt" else "stop")
    assert (end - begin, len(legs)) == (1 << 20 if name == "prompt" else 0, 2)
    assert routed[begin:end] == (prompt[: 1 << 20] if name == "prompt" else b"")
    assert peak < len(raw) // 4


@each(
    "prompt, single",
    [
        ('"a"', True),
        ("[]", False),
        ("[ ]", False),
        ("[1]", True),
        ("[1, 2, 3]", True),
        ('["a"]', True),
        ('[ "a\\\\\\"[" ]', True),
        ('["a", "b"]', False),
        ('["a", 1]', False),
        ('[1, "a"]', False),
        ("[[1, 2]]", True),
        ("[[1, 2], [3]]", False),
        ("[1, [2]]", False),
        (f"[{' ' * 5000}1]", True),
        (f'[{" " * 5000}"a"]', False),  # it may be one: that is not looked for
        (f'["a"{" " * 5000}]', False),
        ("{}", False),
        ("null", False),
    ],
)
def test_one_prompt_is_distinguished_from_several_without_reading_them(prompt: str, single: bool) -> None:
    raw = f'{{"prompt": {prompt}, "x": ["]"]}}'.encode()
    for body in (Body(raw), scanned(raw)):
        assert COMPLETIONS.needs_single_engine(body) == (None if single else "prompt")


@given(st.dictionaries(st.sampled_from(["priority", "prompt", "n"]), st.integers(), max_size=3))
def test_a_member_is_replaced_in_every_leg_and_nothing_else_changes(members: dict[str, int]) -> None:
    body = Body(json.dumps(members).encode()).replaced("priority", b"7")
    assert body.raw_value("priority") == b"7"
    assert json.loads(bytes(COMPLETIONS.whole_body(body))) == {**members, "priority": 7}
    leg = json.loads(bytes(COMPLETIONS.decode_body(body, TRANSFER)))
    assert leg == {**members, "priority": 7, "kv_transfer_params": {"transfer_id": "ours"}}
