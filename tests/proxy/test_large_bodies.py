"""Large bodies are read in steps, to the same end as small ones, and nothing is made for each of their items."""

from __future__ import annotations

import json
import string
import subprocess
import sys
import tracemalloc
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.pd.errors import ApiError
from pdserve.pd.requests.body import EASY_BYTES, FEW_BYTES, Body, MembersAtOnce, members_at_once
from pdserve.pd.requests.dialects import COMPLETIONS
from pdserve.pd.requests.long_value import LONG_BYTES, members_around_long
from pdserve.pd.requests.scan import MAX_BRACKETS, MAX_DEPTH, MAX_MEMBERS, Scan
from tests.tables import each_row

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


def members(body: Body) -> list[tuple[str, bytes, int, int, int]]:
    """Each with its value and its places, in order."""
    return [(span.name, bytes(body.members[span.name]), span.start, span.value, span.end) for span in body._spans]


def agrees(raw: bytes, found: MembersAtOnce | None) -> bool:
    """Tell whether members were found; then they must be those that msgspec reads, and refused if it refuses them."""
    if found is None:
        return False
    try:
        read = members(Body(raw))
    except ApiError:
        with pytest.raises(ApiError):
            Body(raw, members=found)
        return False
    assert members(Body(raw, members=found)) == read
    return True


@given(st.dictionaries(TEXT, JSON, max_size=6), st.integers(SLICE - 40, SLICE + 8), st.sampled_from(["[{}]", '"{}"']))
def test_steps_find_the_members_that_a_reader_of_json_finds(body: dict[str, Any], size: int, around: str) -> None:
    """Wherever the border between two slices falls."""
    body = {"long": None, **body, "behind": 1}
    spelled = json.dumps(body, ensure_ascii=False)
    filler = around.replace("{}", '"%s", 1' % ("x" * size) if around[0] == "[" else "x" * size)
    raw = spelled.replace('"long": null', f'"long": {filler}', 1).encode()
    assert members(scanned(raw)) == members(Body(raw))


@given(JSON, st.integers(SLICE - 60, SLICE + 4))
def test_steps_find_the_end_of_any_value_at_any_border(value: Any, size: int) -> None:
    raw = f'{{"a": ["{"x" * size}", {json.dumps(value)}], "b": {json.dumps(value)} , "c": 1}}'.encode()
    body = scanned(raw)
    assert list(body.members) == ["a", "b", "c"]
    assert json.loads(bytes(body.members["a"]))[1] == value
    assert json.loads(bytes(body.members["b"])) == value


@each_row(
    "raw",
    [
        b"",
        b"[1]",
        b'{"a": 1',
        b'{"a": [1, 2}',
        b'{"a": "b\\"}',
        b'{"a": 1,}',
        b'{"a" 1}',
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


@each_row("read", [Body, scanned])
def test_an_object_of_very_many_members_is_refused(read: Any) -> None:
    def many(count: int) -> bytes:
        return json.dumps({str(index): index for index in range(count)}).encode()

    assert len(read(many(MAX_MEMBERS)).members) == MAX_MEMBERS
    for count in (MAX_MEMBERS + 1, FEW_BYTES // 15):
        with pytest.raises(ApiError, match=f"more than {MAX_MEMBERS} members"):
            read(many(count))


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
    parts = [f"{json.dumps(name)}: {json.dumps(inner)}" for name, inner in body.items()]
    parts += [
        f'"{chr(92)}u{ord(name[0]):04x}{name[1:]}" : {value}' if odd else f'"{name}":{value}' for name, odd in large
    ]
    raw = ("{" + ",".join(parts) + "}").encode()
    agrees(raw, members_at_once(raw))


@each_row("name", [b"a" * 1_000_000, b"\\n" * 500_000, b"\\u0041" * 160_000])
@each_row("colon", [b":", b" :"])
def test_a_very_long_name_is_refused(name: bytes, colon: bytes) -> None:
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


@each_row(
    "raw",
    [
        b"{" + b",".join(b'"%d":1' % number for number in range(100_000)) + b"}",
        b'{"x": {"prompt": "%b"}, "prompt": "%b"}' % (b"x" * 9000, b"x" * 9000),
        b'{"prompt": "' + b"x" * EASY_BYTES + b'"}',
    ],
)
def test_what_takes_long_or_is_not_sure_is_read_in_steps(raw: bytes) -> None:
    assert members_at_once(raw) is None


@each_row(
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


@each_row("prompt", [b"[" + b"1," * 2_000_000 + b"1]", b'["' + b"x" * 4_000_000 + b'"]'])
@each_row("name", ["prompt", "stop"])
def test_looking_at_a_large_body_takes_little_memory(name: str, prompt: bytes) -> None:
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


@each_row(
    "prompt, single",
    [
        ('"a"', True),
        ("[]", False),
        ("[1]", True),
        ("[1, 2, 3]", True),
        ('["a"]', True),
        ('[ "a\\\\\\"[" ]', True),
        ('["a", "b"]', False),
        ('[1, "a"]', False),
        ("[[1, 2]]", True),
        ("[[1, 2], [3]]", False),
        (f"[{' ' * 5000}1]", True),
        (f'[{" " * 5000}"a"]', False),  # it may be one: that is not looked for
        (f'["a"{" " * 5000}]', False),
        ("{}", False),
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


# --- a body that one long value makes large: what is found around that value is what reading all of it finds


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


def same(raw: bytes) -> bool:
    return agrees(raw, members_around_long(raw))


@each_row(
    "body",
    [
        {"messages": CHAT},
        {"model": "m", "messages": LONGER_CHAT, "user": "u"},
        {"model": "m", "messages": CHAT * 15, "stream": True, "stop": ['"messages"', "}"], "user": "next, {"},
        {"tools": [{"name": "a", "parameters": {"b": {}}}], "messages": CHAT, "seed": 1},
        {"messages": CHAT, "tools": [{"name": "a", "parameters": {"messages": {}}}], "stream": False},
        {"prompt": list(range(9000)), "model": "m"},
        {"model": "m", "input": [LONG, LONG[:100]]},
        {"model": "m", "prompt": LONG + "ä", "ä": 1},
    ],
)
@each_row("indent", [None, 2])
@each_row("separators", [(",", ":"), (", ", ": "), (" , ", " : ")])
@each_row("ascii_only", [True, False])
def test_what_clients_send(
    body: dict[str, Any], indent: int | None, separators: tuple[str, str], ascii_only: bool
) -> None:
    raw = json.dumps(body, indent=indent, separators=separators, ensure_ascii=ascii_only).encode()
    assert same(raw) or (ascii_only and "ä" in body), "a name that is written with an escape is not looked for"


def test_little_beside_the_value_and_few_blanks_are_looked_at() -> None:
    assert same(b'{"prompt":"%b","user":"%b"}' % (b"a" * 60_000, b"b" * 50_000))
    assert not same(b'{"prompt":"%b","user":"%b"}' % (b"a" * 60_000, b"b" * 70_000)), "it would be read twice"
    assert same(b'{ "prompt" :\n"%b"\t, \r\n "model" : "m" }\n' % (b"a" * LONG_BYTES))
    assert not same(b'{"prompt":"%b"%b,"model":"m"}' % (b"a" * LONG_BYTES, b" " * 100))


@each_row(
    "raw",
    [
        '{"messages":0,"x":{"messages":LONG,"x":5}}',
        '{"y":{"messages":LONG,"x":5},"messages":0,"x":1}',
        '{"y":{"messages":LONG},"messages":0,"x":{"a":1,"x":5}}',
        '{"y":[{"messages":LONG,"x":5}],"messages":0,"x":[{"a":1,"x":5}]}',
        '{"messages":LONG,"x":1,"user":",\\"x\\":2}"}',
        '{"user":"messages","messages":LONG,"x":1}',
        '{"prompt":LONG,"messages":1}',
        '{"y":{"messages":LONG,"f":1},"messages":0,"\\u0066":2}',
        '{"mess\\u0061ges":0,"f":1,"o":{"messages":LONG,"f":5}}',
        '{"x\\"messages":LONG,"g":1,"h":2,"messages":0,"g\\":1,\\"h":3}',
        '{"messages":LONG,",":",,"}',
        # What engines refuse.
        '{"prompt":LONG,"prompt":LONG}',
        '{"prompt":LONG,"n":1,"\\u006e":2}',
        '{"n":1,"prompt":LONG,"n":2}',
        '["prompt",LONG]',
    ],
)
def test_names_that_come_elsewhere_too_are_not_taken_for_the_members(raw: str) -> None:
    for long in (
        f'"{"a" * LONG_BYTES}"',
        f'["{"a" * LONG_BYTES}",{{"x":1}},"x"]',
        '[{"x":[]},' + "1," * (LONG_BYTES // 2) + "2]",
    ):
        same(raw.replace("LONG", long).encode())


NAMES = st.sampled_from(["messages", "prompt", "input", "x", "y", "z", 'a"b', "ä", "model"])


@given(
    before=st.dictionaries(NAMES, JSON, max_size=4),
    behind=st.dictionaries(NAMES, JSON, max_size=4),
    name=st.sampled_from(["messages", "prompt", "input", "x"]),
    inside=st.lists(JSON, max_size=3),
    blank=st.sampled_from(["", " ", "\n"]),
)
def test_any_object_is_read_as_msgspec_reads_it(
    before: dict[str, Any], behind: dict[str, Any], name: str, inside: list[Any], blank: str
) -> None:
    object_ = before | {name: [inside, "a" * LONG_BYTES, inside]}
    object_ |= {key: value for key, value in behind.items() if key != name}
    same(json.dumps(object_, separators=("," + blank, ":" + blank)).encode())


@given(
    chat=st.sampled_from([CHAT, LONGER_CHAT]),
    at=st.integers(-60, 40) | st.integers(0, 10**6),
    cut=st.integers(0, 1),
    byte=st.sampled_from([bytes([byte]) for byte in b'"\\{}[],: \n\x00\x80\xc3a1'] + [b""]),
)
def test_what_is_not_valid_is_never_read(chat: list[dict[str, str]], at: int, cut: int, byte: bytes) -> None:
    """A byte more, less or another one, anywhere."""
    raw = json.dumps({"model": "m", "messages": chat, "stream": True, "user": "u"}).encode()
    at %= len(raw)
    same(raw[:at] + byte + raw[at + cut :])


@each_row("value", ["1" + "0" * 40, "1e999"])
def test_what_only_simdjson_refuses_is_read_all_the_same(value: str) -> None:
    raw = f'{{"prompt":"{"a" * LONG_BYTES}","n":{value}}}'.encode()
    assert members_around_long(raw) is None
    assert Body(raw).raw_value("n") == value.encode()


@each_row("number", ["1.234567890123456789e-305", "1." + "1" * 700 + "e290", "12345678901234567890.5"])
@each_row("beside", ["", '"' + "a" * 60_000 + '",'])
@each_row("size", [LONG_BYTES, 500_000])
def test_long_numbers_are_left_to_msgspec(number: str, beside: str, size: int) -> None:
    """simdjson would hold up all other requests: 130 kB of the first take it 90 ms."""
    raw = f'{{"prompt":[{beside}{",".join([number] * (1 + size // len(number)))}],"n":1}}'.encode()
    assert LONG_BYTES < len(raw) < EASY_BYTES
    taken = sum(bool(members_around_long(raw)) for _ in range(20))
    assert taken <= 2, "where it looks is drawn each time: one of hundreds may get through"


@each_row("piece", ["1717171717123 GET /page 200 0.003271\\n", "".join(Random(1).choices(BASE64, k=1000))])
def test_text_with_numbers_and_images_are_not(piece: str) -> None:
    raw = f'{{"prompt":"{piece * (500_000 // len(piece))}","n":1}}'.encode()
    assert all(same(raw) for _ in range(20)), "where it looks is drawn each time"


def test_many_members_and_brackets_are_left_to_others() -> None:
    many = b",".join(b'"n%d":1' % number for number in range(100))
    assert members_around_long(b'{"prompt":"%b",%b}' % (b"a" * LONG_BYTES, many)) is None
    assert members_around_long(b'{"prompt":%b%b}' % (b"[" * LONG_BYTES, b"]" * LONG_BYTES)) is None
    assert members_around_long(b'{"prompt":"%b"}' % (b"a" * EASY_BYTES)) is None
    assert same(b'{"prompt":"%b"}' % (b"a" * LONG_BYTES)), "what was refused before leaves nothing behind"


@pytest.mark.process
@pytest.mark.parametrize("missing", ["simdjson", "csimdjson"])
def test_without_simdjson_or_its_library_nothing_is_found(missing: str) -> None:
    """In a process of its own: what a process has found missing it does not look for again."""
    subprocess.run([sys.executable, "-c", WITHOUT, missing], check=True)
