"""A JSON object as the bytes that a client sent: its members are located, cut out and added, never written anew.

So what the proxy does not know survives as it was: the spelling of numbers, the order, the fields of vendors. Names are
compared after unescaping, and a name that comes twice is refused, because two readers could see two values.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any, Final

import msgspec

from pdserve.pd.errors import bad_request
from pdserve.pd.http.pieces import LARGE, Payload, Pieces
from pdserve.pd.requests.member_spans import quoted_name, spans_of, value_behind
from pdserve.pd.requests.scan import MAX_MEMBERS, Scan, too_many_members

EASY_BYTES: Final = 1_100_000
"""Up to here a body is read at once if it has few members: its values are skipped over in some milliseconds. The most
are 12, of strings with an escape at every other place, when simdjson does not read them (requests.long_value)."""
FEW_BYTES: Final = 131_072
"""Up to here whatever is in it: 20,000 members of a few bytes take about a millisecond."""

MEMBERS: Final[msgspec.json.Decoder[dict[str, msgspec.Raw]]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
_OFTEN_LARGE: Final = (
    "messages",
    "prompt",
    "input",
    "tools",
    "system",
    "documents",
    "response_format",
    "structured_outputs",
    "text_1",
    "text_2",
    "queries",
)
"""Members that make a body large."""
_LARGE_VALUE: Final = 4096
_LARGE_VALUES: Final = msgspec.json.Decoder(
    msgspec.defstruct("LargeValues", [(name, msgspec.Raw, msgspec.Raw(b"")) for name in _OFTEN_LARGE])
)
"""Skips over all others without making anything of them."""
IN_PLACE: Final = b"%d" % (1 + secrets.randbits(62))
"""Of a value that was cut out. A number that no client knows: whatever has it stands where that value stood."""
_VALUE: Final = msgspec.json.Decoder()
_MOST_BLANKS: Final = 1024
"""In a list, before its first item and behind its last one."""
_FIRST_ITEM: Final = re.compile(rb"\[[ \t\r\n]*")
_END_OF_LIST: Final = re.compile(rb"[ \t\r\n]*\]")
_COLON: Final = b":"
_COMMA: Final = b","
_NOTHING: Final[frozenset[str]] = frozenset()
_NONE: Final[dict[str, int]] = {}
_MOST_QUOTES: Final = 20_000
"""That are looked at to find the end of a string in a list."""
_MOST_BACKSLASHES: Final = 64


class MembersAtOnce:
    """Members of an object whose large values were found before the others."""

    __slots__ = ("compared", "values")

    def __init__(self, values: dict[str, msgspec.Raw], compared: dict[str, int]) -> None:
        """Hold the members of an object. `compared`: where in the bytes of the object its large values stand."""
        self.values = values
        self.compared = compared


class Body:
    """The members of one JSON object, as they were sent."""

    __slots__ = ("_instead", "_spans", "members", "raw")

    def __init__(
        self, raw: bytes, scan: Scan | None = None, like: Body | None = None, members: MembersAtOnce | None = None
    ) -> None:
        """Read a body. Raises ApiError 400 for what is no JSON object, for NaN and the like, for a name that comes
        twice, and for very many members. `members`: those of a body whose large values were found before
        (`members_at_once`, requests.long_value). `scan`: the scan by which it was read in steps. `like`: a body that
        was read, of which this is a copy."""
        self.raw = raw
        self._instead: dict[str, bytes] | None = None
        """What was put in the place of the client's own, or added."""
        if scan is not None:
            self.members, self._spans = scan.members, scan.spans
            return
        if like is not None:
            self.members, self._spans, self._instead = dict(like.members), like._spans, like._instead
            return
        compared = _NONE
        if members is None:
            self.members = _members(raw, MEMBERS)
            """Name -> the value as it was sent."""
        else:
            self.members, compared = members.values, members.compared
        if len(self.members) > MAX_MEMBERS:
            raise too_many_members()
        self._spans = spans_of(raw, self.members, compared)

    @property
    def payload(self) -> Payload:
        """Return all of the body, as it is sent."""
        return self.spliced(plus={}) if self._instead is not None else self.raw

    def replaced(self, name: str, value: bytes) -> Body:
        """Return this body with one member of ours; `value` is JSON, `name` needs no escape."""
        body = Body(self.raw, like=self)
        body.members[name] = msgspec.Raw(value)
        body._instead = {**(self._instead or {}), name: value}
        return body

    def __contains__(self, name: str) -> bool:
        return name in self.members

    def raw_value(self, name: str) -> bytes | None:
        """Return the value as it was sent; None when there is none."""
        if name not in self.members:
            return None
        if self._instead is not None and name in self._instead:
            return self._instead[name]
        begin, end = self.place(name)
        return self.raw[begin:end]

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value, decoded. This is for small ones: nothing is remembered."""
        value = self.raw_value(name)
        return default if value is None else decode(value)

    def begins(self, name: str) -> bytes:
        """Return the first byte of a value, which is its type; empty when there is none."""
        return self.beginning((name,), 1)

    def count(self, name: str, byte: bytes, most: int) -> int:
        """Return how often a byte is in the first `most` bytes of a value, without a copy of it."""
        if name not in self.members:
            return 0
        begin, end = self.place(name)
        return self.raw.count(byte, begin, min(end, begin + most))

    def length(self, name: str) -> int:
        """Return the bytes of a value; 0 when there is none."""
        if name not in self.members:
            return 0
        if self._instead is not None and name in self._instead:
            return len(self._instead[name])
        begin, end = self.place(name)
        return end - begin

    def place(self, name: str) -> tuple[int, int]:
        """Return begin and end in `raw` of a value of the client's own (a member that was not replaced). Raises
        KeyError where there is none."""
        for span in self._spans:
            if span.name == name:
                return span.value, span.end
        raise KeyError(name)

    def beginning(self, names: tuple[str, ...], most: int) -> bytes:
        """Return the values of these members one after the other, as they were sent, up to `most` bytes."""
        beginning = b""
        for name in names:
            left = most - len(beginning)
            if left <= 0 or name not in self.members:
                continue
            if self._instead is not None and name in self._instead:
                beginning += self._instead[name][:left]
            else:
                begin, end = self.place(name)
                beginning += self.raw[begin : min(end, begin + left)]
        return beginning

    def has_single_or_plain_items(self, name: str) -> bool:
        """Return whether a value is a list of one item, or one of several numbers and the like: no list, string or
        object among them. Not decoded: a list may have millions of items. False also when that is not easily seen."""
        value = self.members.get(name)
        if value is None or self.begins(name) != b"[":
            return False
        begin, end = self.place(name)
        raw = self.raw
        first = _FIRST_ITEM.match(raw, begin, min(end, begin + _MOST_BLANKS))
        at = end if first is None else first.end()
        byte = raw[at : at + 1]
        if byte == b'"':
            at = _end_of_string(raw, at, end)
        elif byte == b"[":
            if raw.find(b'"', at, end) >= 0 or raw.find(b"[", at + 1, end) >= 0:
                return False
            at = raw.find(b"]", at, end) + 1
        elif byte in (b"]", b"{"):
            return False
        else:
            return raw.find(b'"', at, end) < 0 and raw.find(b"[", at, end) < 0 and raw.find(b"{", at, end) < 0
        if end - at > _MOST_BLANKS:
            return False
        last = _END_OF_LIST.match(raw, at, end)
        return at > 0 and last is not None and last.end() == end

    def spliced(self, *, without: frozenset[str] = _NOTHING, plus: dict[str, bytes]) -> Payload:
        """Return the object with some members cut out and others added at its end; `plus` also replaces. Its values are
        JSON, its names need no escape."""
        return self.cut(without.union(plus), write_object(plus))

    def cut(self, without: frozenset[str], added: bytes) -> Payload:
        """Return the body with members that are written already (`added`); what they replace is in `without`."""
        if self._instead is not None:
            own = {name: value for name, value in self._instead.items() if name not in without}
            without = without.union(own)
            added = write_object(own) + (_COMMA if own and added else b"") + added
        raw, spans = self.raw, self._spans
        begin, end = (spans[0].start, spans[-1].end) if spans else (raw.rindex(b"}"),) * 2
        kept = self._kept(without)
        if kept and added:
            added = _COMMA + added
        if len(raw) < LARGE:
            members = raw[kept[0][0] : kept[0][1]] if kept else b""
            for first, last in kept[1:]:
                members = members + _COMMA + raw[first:last]
            return b"".join((raw[:begin], members, added, raw[end:]))
        # A large one is not copied: each copy would cost more than all else.
        view = memoryview(raw)
        pieces: list[bytes | memoryview] = [view[:begin]]
        for first, last in kept:
            if len(pieces) > 1:
                pieces.append(_COMMA)
            pieces.append(view[first:last])
        pieces += (added, view[end:])
        return Pieces(pieces)

    def _kept(self, without: frozenset[str]) -> list[tuple[int, int]]:
        """Return the places of the members that stay; those that follow each other are one place."""
        kept: list[tuple[int, int]] = []
        # No member is at 0: there stands the brace.
        first = last = 0
        for span in self._spans:
            if span.name in without:
                if first:
                    kept.append((first, last))
                    first = 0
            else:
                if not first:
                    first = span.start
                last = span.end
        if first:
            kept.append((first, last))
        return kept


def members_at_once(raw: bytes) -> MembersAtOnce | None:
    """Return the members of a body that is larger than FEW_BYTES, if that takes a few milliseconds; None: it must be
    read in steps (requests.scan). ApiError 400 as for a Body.

    What takes time is many members. The values that make most bodies large are cut out, and what is left is small. A
    value is looked for behind the first mention of its name: a place that is not the member's own leaves the value in
    the rest, which then does not have the number that stands for it.
    """
    if len(raw) > EASY_BYTES:
        return None
    values = _members(raw, _LARGE_VALUES)
    large = []
    for name in _OFTEN_LARGE:
        value: msgspec.Raw = getattr(values, name)
        if len(memoryview(value)) > _LARGE_VALUE:
            begin = value_behind(raw, name)
            if begin < 0 or not raw.startswith(value, begin):
                return None
            large.append((begin, name, value))
    large.sort(key=_begin)
    pieces: list[bytes] = []
    end = 0
    for begin, _, value in large:
        if begin < end:
            return None  # the name of one is in the value of another one
        pieces += (raw[end:begin], IN_PLACE)
        end = begin + len(memoryview(value))
    rest = b"".join((*pieces, raw[end:]))
    if len(rest) > FEW_BYTES and rest.count(b":") > MAX_MEMBERS:
        return None
    members: dict[str, msgspec.Raw] = _members(rest, MEMBERS)
    for _, name, value in large:
        if bytes(members[name]) != IN_PLACE:
            return None
        members[name] = value
    return MembersAtOnce(members, {name: begin for begin, name, _ in large})


def _begin(large: tuple[int, str, msgspec.Raw]) -> int:
    return large[0]


def _members(raw: bytes, decoder: msgspec.json.Decoder[Any]) -> Any:
    try:
        if not raw.isascii():
            # The inside of values is only skipped over below.
            raw.decode()
        return decoder.decode(raw)
    except RecursionError:
        raise bad_request("The request body is nested too deeply.") from None
    except msgspec.ValidationError:
        raise bad_request("The request body must be a JSON object.") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"The request body is not valid JSON: {_reason(error)}.") from None


def decode(raw: bytes) -> Any:
    """Decode a JSON value. Raises ApiError 400 when it is none: the inside of a value is not looked at before."""
    try:
        return _VALUE.decode(raw)
    except RecursionError:
        raise bad_request("The request body is nested too deeply.") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"The request body is not valid JSON: {_reason(error)}.") from None


def encode(value: Any) -> bytes:
    """Return compact JSON."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def _end_of_string(raw: bytes, begin: int, end: int) -> int:
    """Return the position behind a string's last quote; 0: it is not near."""
    at = begin
    for _ in range(_MOST_QUOTES):
        at = raw.find(b'"', at + 1, end)
        if at < 0:
            return 0
        before = raw[max(begin, at - _MOST_BACKSLASHES) : at]
        backslashes = len(before) - len(before.rstrip(b"\\"))
        if backslashes == _MOST_BACKSLASHES:
            return 0
        if backslashes % 2 == 0:
            return at + 1
    return 0


def write_object(members: dict[str, bytes]) -> bytes:
    """Return the members as they stand in an object."""
    parts: list[bytes] = []
    for name, value in members.items():
        parts.append(quoted_name(name))
        parts.append(_COLON)
        parts.append(value)
        parts.append(_COMMA)
    if parts:
        parts.pop()
    return b"".join(parts)


def _reason(error: Exception) -> str:
    return str(error).removeprefix("JSON is malformed: ")
