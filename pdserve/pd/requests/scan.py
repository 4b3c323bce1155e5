"""The members of a large JSON object, found in small steps: other clients have their turn between two of them.

What it knows is strings and brackets, which is what decides where a member ends. The inside of a value is the engine's
to judge. Each step looks at slices with functions of C that make no Python object for each item.
"""

from __future__ import annotations

import codecs
import json
import re
from time import monotonic
from typing import Final

import msgspec

from pdserve.pd.errors import ApiError, bad_request

MAX_MEMBERS: Final = 1024
"""Of a request body. vLLM's APIs have less than 100."""
MAX_DEPTH: Final = 1000
"""Brackets within brackets, more or less; Python's own reader takes no more."""
MAX_BRACKETS: Final = 2_000_000
"""That open or close a list or an object, in a large body."""
STEP_SECONDS: Final = 0.002
_SLICE: Final = 65_536
_SMALL_SLICE: Final = 4096
_LONGEST_NAME: Final = 1024
_LONGEST_NUMBER: Final = 4096
_PASSES: Final = 8

_BLANKS: Final = re.compile(rb"[ \t\r\n]*")
_NAME: Final = re.compile(rb'"((?:[^"\\]|\\.)*)"', re.S)
_STRING: Final = re.compile(rb'(?:[^"\\]++|\\.)*', re.S)
_SCALAR: Final = re.compile(rb"[-+.0-9A-Za-z]*")
_TO_SQUARE: Final = bytes.maketrans(b"{}", b"[]")
_OTHERS: Final = bytes(set(range(256)) - set(b"[]{}"))

_VALUE: Final = msgspec.json.Decoder()

_OUTSIDE: Final = 0
_BEFORE_FIRST: Final = 1
_BEFORE_NAME: Final = 2
_BEFORE_COLON: Final = 3
_BEFORE_VALUE: Final = 4
_IN_SCALAR: Final = 5
_IN_STRING: Final = 6
_IN_BRACKETS: Final = 7
_AFTER: Final = 8
_BEHIND: Final = 9


class MemberSpan:
    """The place of a member in the bytes of its object."""

    __slots__ = ("end", "name", "start", "value")

    def __init__(self, name: str, start: int, value: int, end: int) -> None:
        """Place a member: it begins at `start`, its value at `value`; both end at `end`."""
        self.name = name
        self.start = start
        self.value = value
        self.end = end


class Scan:
    """Finds the members of one object. Call `step` until it returns True; then `members` and `spans` are complete."""

    __slots__ = (
        "_at",
        "_begin",
        "_brackets",
        "_checked",
        "_depth",
        "_in_string",
        "_name",
        "_named_at",
        "_slice",
        "_state",
        "_utf8",
        "members",
        "raw",
        "spans",
        "view",
    )

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.view = memoryview(raw)
        self.members: dict[str, msgspec.Raw] = {}
        self.spans: list[MemberSpan] = []
        """The spans of each member, in order."""
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._checked = 0
        """Bytes that are known to be UTF-8."""
        self._at = 0
        self._state = _OUTSIDE
        self._name = ""
        self._named_at = 0
        self._begin = 0
        """Where the value begins."""
        self._depth = 0
        self._in_string = False
        self._brackets = 0
        """How many were passed."""
        self._slice = _SMALL_SLICE

    def step(self) -> bool:
        """Work for a few milliseconds, and return whether it is done. Raises ApiError 400 when this is no JSON object
        that an engine may get."""
        end = monotonic() + STEP_SECONDS
        while monotonic() < end:
            if self._checked < len(self.raw):
                self._check_text()
            elif self._move():
                return True
        return False

    def _check_text(self) -> None:
        piece = self.raw[self._checked : self._checked + _SLICE]
        self._checked += len(piece)
        last = self._checked >= len(self.raw)
        if last or not piece.isascii() or self._utf8.getstate()[0]:
            try:
                self._utf8.decode(piece, last)
            except UnicodeDecodeError as error:
                raise bad_request(f"The request body is not valid JSON: {error.reason}.") from None

    def _move(self) -> bool:
        """Read one slice of a value, or the next thing beside values."""
        state = self._state
        if state == _IN_BRACKETS:
            self._pass_brackets()
        elif state == _IN_STRING:
            self._pass_string()
        elif state == _IN_SCALAR:
            self._pass_scalar()
        else:
            at = self._at
            self._at = self._blanks(at)
            if self._at == at + _SLICE:
                return False
            if self._at == len(self.raw):
                if state == _BEHIND:
                    return True
                raise _broken("it ends too early")
            self._take(self.raw[self._at : self._at + 1])
        return False

    def _blanks(self, at: int) -> int:
        match = _BLANKS.match(self.raw, at, at + _SLICE)
        return at if match is None else match.end()

    def _take(self, byte: bytes) -> None:
        """Take a byte between values, which is no blank."""
        state = self._state
        if state == _OUTSIDE:
            if byte != b"{":
                raise bad_request("The request body must be a JSON object.")
            self._state = _BEFORE_FIRST
            self._at += 1
        elif byte == b"}" and state in (_BEFORE_FIRST, _AFTER):
            self._state = _BEHIND
            self._at += 1
        elif state in (_BEFORE_FIRST, _BEFORE_NAME):
            self._read_name()
        elif state == _BEFORE_COLON and byte == b":":
            self._state = _BEFORE_VALUE
            self._at += 1
        elif state == _BEFORE_VALUE:
            self._begin_value(byte)
        elif state == _AFTER and byte == b",":
            self._state = _BEFORE_NAME
            self._at += 1
        else:
            raise _broken(f"unexpected character (byte {self._at})")

    def _read_name(self) -> None:
        match = _NAME.match(self.raw, self._at, self._at + _LONGEST_NAME)
        if match is None:
            raise _broken(f"a name of at most {_LONGEST_NAME} bytes is expected (byte {self._at})")
        try:
            name = json.loads(match[0])
        except ValueError:
            raise _broken(f"a name cannot be read (byte {self._at})") from None
        if name in self.members:
            raise bad_request("A name comes twice in the request body.")
        if len(self.members) >= MAX_MEMBERS:
            raise too_many_members()
        self._name, self._named_at = name, self._at
        self._at = match.end()
        self._state = _BEFORE_COLON

    def _begin_value(self, byte: bytes) -> None:
        self._begin = self._at
        self._slice = _SMALL_SLICE
        if byte == b'"':
            self._state = _IN_STRING
            self._at += 1
        elif byte in (b"[", b"{"):
            self._state = _IN_BRACKETS
            self._at += 1
            self._depth = 1
            self._in_string = False
        else:
            self._state = _IN_SCALAR

    def _end_value(self, end: int) -> None:
        self.members[self._name] = msgspec.Raw(self.view[self._begin : end])
        self.spans.append(MemberSpan(self._name, self._named_at, self._begin, end))
        self._at = end
        self._state = _AFTER

    def _pass_scalar(self) -> None:
        match = _SCALAR.match(self.raw, self._at, self._at + _LONGEST_NUMBER)
        end = self._at if match is None else match.end()
        try:
            _VALUE.decode(self.raw[self._at : end])
        except msgspec.DecodeError:
            raise _broken(f"a value cannot be read (byte {self._at})") from None
        self._end_value(end)

    def _pass_string(self) -> None:
        piece = self._piece()
        if b'"' not in _without_escapes(piece):
            self._next_slice(piece)
            return
        match = _STRING.match(piece)
        assert match is not None
        self._end_value(self._at + match.end() + 1)

    def _pass_brackets(self) -> None:
        piece = self._piece()
        outside, in_string = _outside_strings(piece, self._in_string)
        brackets = outside.translate(_TO_SQUARE, _OTHERS)
        if self._brackets + len(brackets) > MAX_BRACKETS:
            raise bad_request("The request body has too many lists and objects.")
        lowest, change, highest = _levels(brackets)
        if self._depth + highest > MAX_DEPTH:
            raise bad_request("The request body is nested too deeply.")
        if self._depth + lowest > 0:
            self._depth += change
            self._in_string = in_string
            self._brackets += len(brackets)
            self._next_slice(piece)
        elif self._slice > _SMALL_SLICE:
            # It ends within: where exactly is looked for in a smaller slice.
            self._slice = max(_SMALL_SLICE, self._slice // 4)
        else:
            self._end_value(self._at + _end_of_brackets(piece, self._depth, self._in_string))

    def _piece(self) -> bytes:
        """Return the next slice, whose last backslash is not parted from what it escapes."""
        piece = self.raw[self._at : self._at + self._slice]
        if piece.endswith(b"\\"):
            backslashes = len(piece) - len(piece.rstrip(b"\\"))
            if backslashes % 2:
                piece = piece[:-1]
        if not piece:
            raise _broken("it ends too early")
        return piece

    def _next_slice(self, piece: bytes) -> None:
        self._at += len(piece)
        self._slice = min(2 * self._slice, _SLICE)


def too_many_members() -> ApiError:
    return bad_request(f"The request body has more than {MAX_MEMBERS} members.")


def _broken(why: str) -> ApiError:
    return bad_request(f"The request body is not valid JSON: {why}.")


def _without_escapes(piece: bytes) -> bytes:
    """Return strings without what a backslash may hide."""
    if b"\\" not in piece:
        return piece
    return piece.replace(b"\\\\", b"").replace(b'\\"', b"")


def _outside_strings(piece: bytes, in_string: bool) -> tuple[bytes, bool]:
    """Return what of the piece is in no string, and whether its end is in one."""
    parts = _without_escapes(piece).split(b'"')
    return b"".join(parts[1::2] if in_string else parts[0::2]), in_string == (len(parts) % 2 == 1)


def _levels(brackets: bytes) -> tuple[int, int, int]:
    """Return (the lowest level, the last one, the highest one), all as seen from the level before. Up to a few levels
    that open and close again within count for nothing in the highest one."""
    for _ in range(_PASSES):
        before = len(brackets)
        brackets = brackets.replace(b"[]", b"")
        if len(brackets) == before:
            # First all that close, then all that open.
            closed = brackets.count(b"]")
            return -closed, before - 2 * closed, max(0, before - 2 * closed)
    level = lowest = highest = 0
    for byte in brackets:
        if byte == 0x5B:
            level += 1
            if level > highest:
                highest = level
        else:
            level -= 1
            if level < lowest:
                lowest = level
    return lowest, level, highest


def _end_of_brackets(piece: bytes, depth: int, in_string: bool) -> int:
    """Return the position behind the bracket that ends the value, which is in this slice."""
    escaped = False
    for index, byte in enumerate(piece):
        if in_string:
            if escaped:
                escaped = False
            elif byte == 0x5C:
                escaped = True
            elif byte == 0x22:
                in_string = False
        elif byte == 0x22:
            in_string = True
        elif byte in (0x5B, 0x7B):
            depth += 1
        elif byte in (0x5D, 0x7D):
            depth -= 1
            if not depth:
                return index + 1
    raise _broken("its brackets do not match")
