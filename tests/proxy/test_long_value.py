"""A body that one long value makes large: what is found around that value is what reading all of it finds."""

from __future__ import annotations

import json
import string
import subprocess
import sys
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.pd.errors import ApiError
from pdserve.pd.requests.body import EASY_BYTES, Body
from pdserve.pd.requests.long_value import LONG_BYTES, members_around_long
from tests.proxy.rows import each

pytestmark = pytest.mark.process

LONG = 'He said "no" \\ and wrote:\n\t{"messages": [1, 2], "stream": true}, ' * 800
"""Of what a text may have that looks like members."""
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": LONG}]
LONGER_CHAT = [*CHAT, {"role": "user", "content": LONG * 4}]
BASE64 = string.ascii_letters + string.digits + "+/"
WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None
from pdserve.pd.requests.long_value import members_around_long
assert members_around_long(b'{"prompt":"%b"}' % (b"a" * 50_000)) is None
"""


def members(body: Body) -> list[tuple[str, bytes, int, int, int]]:
    """Each with its value and its places, in order."""
    return [(span.name, bytes(body.members[span.name]), span.start, span.value, span.end) for span in body._spans]


def same(raw: bytes) -> bool:
    """Whether members were found around a long value; then they must be those that msgspec reads."""
    around = members_around_long(raw)
    if around is None:
        return False
    assert members(Body(raw, members=around)) == members(Body(raw))
    return True


@each(
    "body",
    [
        {"messages": CHAT},
        {"model": "m", "messages": CHAT},
        {"messages": CHAT, "max_tokens": 64},
        {"model": "m", "messages": LONGER_CHAT, "user": "u"},
        {"messages": CHAT * 15, "stream": False},
        {"model": "m", "messages": CHAT, "stream": True, "stop": ['"messages"', "}"], "user": "next, {"},
        {"tools": [{"name": "a", "parameters": {"b": {}}}], "messages": CHAT, "seed": 1},
        {"messages": CHAT, "tools": [{"name": "a", "parameters": {"messages": {}}}], "stream": False},
        {"model": "m", "prompt": LONG, "n": 1},
        {"prompt": list(range(9000)), "model": "m"},
        {"model": "m", "input": [LONG, LONG[:100]]},
        {"model": "m", "prompt": LONG + "ä", "ä": 1},
    ],
)
@each("indent", [None, 2])
@each("separators", [(",", ":"), (", ", ": "), (" , ", " : ")])
@each("ascii_only", [True, False])
def test_what_clients_send(
    body: dict[str, Any], indent: int | None, separators: tuple[str, str], ascii_only: bool
) -> None:
    raw = json.dumps(body, indent=indent, separators=separators, ensure_ascii=ascii_only).encode()
    assert same(raw) or (ascii_only and "ä" in body), "a name that is written with an escape is not looked for"


def test_a_value_that_is_less_than_half_of_a_body_is_left_to_msgspec() -> None:
    """What is beside it would be read twice."""
    assert same(b'{"prompt":"%b","user":"%b"}' % (b"a" * 60_000, b"b" * 50_000))
    assert not same(b'{"prompt":"%b","user":"%b"}' % (b"a" * 60_000, b"b" * 70_000))


def test_a_few_blanks_may_be_around_all() -> None:
    assert same(b'{ "prompt" :\n"%b"\t, \r\n "model" : "m" }\n' % (b"a" * LONG_BYTES))
    assert not same(b'{"prompt":"%b"%b,"model":"m"}' % (b"a" * LONG_BYTES, b" " * 100)), "many are not looked at"


@each(
    "raw",
    [
        '{"messages":0,"x":{"messages":LONG,"x":5}}',
        '{"y":{"messages":LONG,"x":5},"messages":0,"x":1}',
        '{"y":{"messages":LONG},"messages":0,"x":{"x":5}}',
        '{"y":{"messages":LONG},"messages":0,"x":{"a":1,"x":5}}',
        '{"y":[{"messages":LONG,"x":5}],"messages":0,"x":[{"a":1,"x":5}]}',
        '{"messages":LONG,"x":"a","y":["x",{"x":1},[1,"x"]]}',
        '{"messages":LONG,"x":1,"user":"x"}',
        '{"messages":LONG,"x":1,"user":",\\"x\\":2}"}',
        '{"user":"\\"messages\\":0","messages":LONG,"x":1}',
        '{"user":"messages","messages":LONG,"x":1}',
        '{"messages":LONG,"prompt":LONG}',
        '{"prompt":LONG,"messages":1}',
        '{"mess\\u0061ges":LONG,"messages":1,"x":2}',
        '{"messages":LONG,"\\u0078":1}',
        '{"messages":LONG}',
        '{"y":{"messages":LONG,"f":1},"messages":0,"\\u0066":2}',
        '{"mess\\u0061ges":0,"f":1,"o":{"messages":LONG,"f":5}}',
        '{"x\\"messages":LONG,"g":1,"h":2,"messages":0,"g\\":1,\\"h":3}',
        '{"messages":LONG,",":",,"}',
    ],
)
def test_names_that_come_elsewhere_too_are_not_taken_for_the_members(raw: str) -> None:
    for long in (
        f'"{"a" * LONG_BYTES}"',
        f'["{"a" * LONG_BYTES}",{{"x":1}},"x"]',
        '[{"x":[]},' + "1," * (LONG_BYTES // 2) + "2]",
    ):
        same(raw.replace("LONG", long).encode())


small = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.sampled_from(["", "x", "messages", '"', "\\", ',"x":', "}", "ä"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=3),
    max_leaves=5,
)
names = st.sampled_from(["messages", "prompt", "input", "x", "y", "z", 'a"b', "ä", "model"])


@given(
    before=st.dictionaries(names, small, max_size=4),
    behind=st.dictionaries(names, small, max_size=4),
    name=st.sampled_from(["messages", "prompt", "input", "x"]),
    inside=st.lists(small, max_size=3),
    blank=st.sampled_from(["", " ", "\n"]),
)
def test_any_object_is_read_as_msgspec_reads_it(
    before: dict[str, Any], behind: dict[str, Any], name: str, inside: list[Any], blank: str
) -> None:
    object_ = before | {name: [inside, "a" * LONG_BYTES, inside]}
    object_ |= {key: value for key, value in behind.items() if key != name}
    same(json.dumps(object_, separators=("," + blank, ":" + blank)).encode())


@given(seed=st.integers(0, 10**6))
def test_what_is_not_valid_is_never_read(seed: int) -> None:
    """A byte more, less or another one, anywhere."""
    chance = Random(seed)
    messages = chance.choice((CHAT, LONGER_CHAT))
    raw = bytearray(json.dumps({"model": "m", "messages": messages, "stream": True, "user": "u"}).encode())
    near = [*range(40), *range(len(raw) - 60, len(raw)), *(chance.randrange(len(raw)) for _ in range(40))]
    at = chance.choice(near)
    byte = chance.choice(b'"\\{}[],: \n\x00\x80\xc3a1')
    match chance.randrange(3):
        case 0:
            raw[at] = byte
        case 1:
            raw.insert(at, byte)
        case _:
            del raw[at]
    data = bytes(raw)
    try:
        read = members(Body(data))
    except ApiError:
        # Of what msgspec refuses nothing is found, or the body that is made of it is refused.
        around = members_around_long(data)
        if around is not None:
            with pytest.raises(ApiError):
                Body(data, members=around)
        return
    around = members_around_long(data)
    if around is not None:
        assert members(Body(data, members=around)) == read


@each(
    "raw",
    [
        '{"prompt":"LONG","prompt":"LONG"}',
        '{"prompt":"LONG","n":1,"n":2}',
        '{"prompt":"LONG","n":1,"\\u006e":2}',
        '{"n":1,"prompt":"LONG","n":2}',
        '{"prompt":"LONG","n":1}}',
        '{"prompt":"LONG","n":1',
        '{"prompt":"LONG\x01","n":1}',
        '{"prompt":"LONG\\q","n":1}',
        '{"prompt":"LONG,"n":1}',
        '["prompt","LONG"]',
        '"LONG"',
    ],
)
def test_what_engines_refuse_is_left_to_msgspec(raw: str) -> None:
    assert members_around_long(raw.replace("LONG", "a" * LONG_BYTES).encode()) is None


@each("value", ["1" + "0" * 40, "1e999"])
def test_what_only_simdjson_refuses_is_read_all_the_same(value: str) -> None:
    raw = f'{{"prompt":"{"a" * LONG_BYTES}","n":{value}}}'.encode()
    assert members_around_long(raw) is None
    assert Body(raw).raw_value("n") == value.encode()


@each("number", ["1.234567890123456789e-305", "1." + "1" * 700 + "e290", "12345678901234567890.5"])
@each("beside", ["", '"' + "a" * 60_000 + '",'])
@each("size", [LONG_BYTES, 500_000])
def test_long_numbers_are_left_to_msgspec(number: str, beside: str, size: int) -> None:
    """simdjson would hold up all other requests: 130 kB of the first take it 90 ms."""
    raw = f'{{"prompt":[{beside}{",".join([number] * (1 + size // len(number)))}],"n":1}}'.encode()
    assert LONG_BYTES < len(raw) < EASY_BYTES
    taken = sum(bool(members_around_long(raw)) for _ in range(20))
    assert taken <= 2, "where it looks is drawn each time: one of hundreds may get through"


@each("size", [LONG_BYTES, 500_000])
@each(
    "piece", ["1717171717123 GET /page 200 0.003271\\n", "".join(Random(1).choices(BASE64, k=1000)), "123,45.6,-7e9,"]
)
def test_text_with_numbers_and_images_are_not(piece: str, size: int) -> None:
    raw = f'{{"prompt":"{piece * (1 + size // len(piece))}","n":1}}'.encode()
    assert all(same(raw) for _ in range(20)), "where it looks is drawn each time"


def test_text_that_is_not_utf_8_is_left_to_msgspec() -> None:
    raw = b'{"prompt":"%b\xff","n":1}' % (b"a" * LONG_BYTES)
    assert members_around_long(raw) is None
    with pytest.raises(ApiError, match="not valid JSON"):
        Body(raw)


def test_many_members_or_brackets_and_what_is_too_large_are_left_to_others() -> None:
    many = b",".join(b'"n%d":1' % number for number in range(100))
    assert members_around_long(b'{"prompt":"%b",%b}' % (b"a" * LONG_BYTES, many)) is None
    assert members_around_long(b'{"prompt":%b%b}' % (b"[" * LONG_BYTES, b"]" * LONG_BYTES)) is None
    assert members_around_long(b'{"prompt":"%b"}' % (b"a" * EASY_BYTES)) is None
    assert same(b'{"prompt":"%b"}' % (b"a" * LONG_BYTES)), "what was refused before leaves nothing behind"


@pytest.mark.parametrize("missing", ["simdjson", "csimdjson"])
def test_without_simdjson_or_its_library_nothing_is_found(missing: str) -> None:
    """In a process of its own: what a process has found missing it does not look for again."""
    subprocess.run([sys.executable, "-c", WITHOUT, missing], check=True)
