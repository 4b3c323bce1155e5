"""A JSON object as the bytes that a client sent: its members are found, cut out and added, never written anew.

So what nobody here understands survives as it was: the spelling of numbers, the order, the fields of vendors. Names are
compared after unescaping, and a name that comes twice is refused, because two readers could see two values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

import msgspec

from pdserve.pd.errors import bad_request
from pdserve.pd.pieces import Payload, payload

_MEMBERS: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
_VALUE = msgspec.json.Decoder()
_ITEMS: msgspec.json.Decoder[list[msgspec.Raw]] = msgspec.json.Decoder(list[msgspec.Raw])
_KEY = re.compile(rb'[ \t\r\n]*("(?:[^"\\]|\\.)*")[ \t\r\n]*:[ \t\r\n]*', re.S)
_LONGEST_KEPT = 64
"""Characters of a name: clients choose them, and must not choose what we remember."""
_SEPARATOR = re.compile(rb"[ \t\r\n]*([,}])")


class Body:
    """The members of one JSON object, as they were sent."""

    __slots__ = ("_spans", "members", "raw")

    def __init__(self, raw: bytes) -> None:
        """400 for what is no JSON object, for NaN and the like, and for a name that comes twice."""
        self.raw = raw
        try:
            if not raw.isascii():
                # The inside of values is only skipped over below.
                raw.decode()
            self.members = _MEMBERS.decode(raw)
            """Name -> the value as it was sent."""
        except RecursionError:
            raise bad_request("The request body is nested too deeply.") from None
        except msgspec.ValidationError:
            raise bad_request("The request body must be a JSON object.") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise bad_request(f"The request body is not valid JSON: {_said(error)}.") from None
        self._spans = self._walk()

    def __contains__(self, name: str) -> bool:
        return name in self.members

    def raw_value(self, name: str) -> bytes | None:
        """The value as it was sent; None when there is none."""
        value = self.members.get(name)
        return None if value is None else bytes(value)

    def get(self, name: str, default: Any = None) -> Any:
        """The value, decoded. For small ones: nothing is remembered."""
        value = self.members.get(name)
        return default if value is None else decode(bytes(value))

    def begins(self, name: str) -> bytes:
        """The first byte of a value, which is its type; empty when there is none."""
        value = self.members.get(name)
        return b"" if value is None else bytes(memoryview(value)[:1])

    def count(self, name: str, byte: bytes, most: int) -> int:
        """How often a byte is in the first `most` bytes of a value, without a copy of it."""
        for member, start, end in self._spans:
            if member == name:
                begin = end - len(memoryview(self.members[name]))
                return self.raw.count(byte, begin, min(end, begin + most)) if start < begin else 0
        return 0

    def items(self, name: str) -> list[bytes]:
        """The items of a list as they were sent; ValueError when it is none."""
        try:
            return [bytes(item) for item in _ITEMS.decode(self.members[name])]
        except (KeyError, msgspec.DecodeError) as error:
            raise ValueError(f"{name} is no list") from error

    def spliced(self, *, without: Collection[str] = (), plus: Mapping[str, bytes]) -> Payload:
        """The object with some members cut out and others added at its end; `plus` also replaces. Its values are JSON,
        its names need no escape."""
        raw, spans = memoryview(self.raw), self._spans
        begin, end = (spans[0][1], spans[-1][2]) if spans else (self.raw.rindex(b"}"),) * 2
        # A large one is not copied: each copy would cost more than all else.
        pieces: list[bytes | memoryview] = [raw[:begin]]
        # No member is at 0: there stands the brace.
        first = last = 0
        for name, start, stop in spans:
            if name in without or name in plus:
                if first:
                    pieces += (raw[first:last], b",")
                    first = 0
            else:
                if not first:
                    first = start
                last = stop
        if first:
            pieces += (raw[first:last], b",")
        for name, value in plus.items():
            pieces += (_quoted(name), b":", value, b",")
        if len(pieces) > 1:
            pieces.pop()
        pieces.append(raw[end:])
        return payload(pieces, len(raw))

    def _walk(self) -> list[tuple[str, int, int]]:
        """(name, start, end) of each member, in order."""
        # Where the first name ends, if it has no colon itself: what is guessed wrong is walked slowly.
        colon = self.raw.find(b":")
        separator = 2 if self.raw[colon + 1 : colon + 2] == b" " else 1
        spans = self._stride(separator)
        return self._step() if spans is None else spans

    def _stride(self, separator: int) -> list[tuple[str, int, int]] | None:
        """The same for an object that is written as programs do, with separators of this length: compact, or with a
        blank after each. None: it is not. Each byte is accounted for, so that nothing can come twice."""
        raw = self.raw
        position = 1
        spans = []
        begins = raw.startswith
        for name, value in self.members.items():
            start = position
            quoted = _quoted(name) if len(name) <= _LONGEST_KEPT else b'"%b"' % name.encode()
            position += len(quoted) + separator
            if not (begins(quoted, start) and begins(value, position)):
                return None
            position += len(memoryview(value))
            spans.append((name, start, position))
            position += separator
        return spans if position - separator + 1 == len(raw) and raw[:1] == b"{" else None

    def _step(self) -> list[tuple[str, int, int]]:
        """The same for any object. What msgspec took is walked along; a step that does not fit is a member that it has
        dropped, which only happens to one of two with the same name."""
        raw = self.raw
        position = raw.index(b"{") + 1
        spans = []
        for name, value in self.members.items():
            key = _KEY.match(raw, position)
            assert key is not None
            start = key.start(1)
            if _name(key[1]) != name or not raw.startswith(value, key.end()):
                raise _twice()
            end = key.end() + len(memoryview(value))
            after = _SEPARATOR.match(raw, end)
            if after is None:
                raise _twice()
            spans.append((name, start, end))
            position = after.end()
            closed = after[1] == b"}"
            if closed and len(spans) < len(self.members):
                raise _twice()
        if spans and not closed:
            raise _twice()
        return spans


def decode(raw: bytes) -> Any:
    """A JSON value. 400 when it is none: the inside of a value is not looked at before."""
    try:
        return _VALUE.decode(raw)
    except RecursionError:
        raise bad_request("The request body is nested too deeply.") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"The request body is not valid JSON: {_said(error)}.") from None


def encode(value: Any) -> bytes:
    """Compact JSON."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


@lru_cache(maxsize=1024)
def _quoted(name: str) -> bytes:
    """As programs write a name that needs no escape."""
    return b'"%b"' % name.encode()


def _name(quoted: bytes) -> str:
    if b"\\" not in quoted:
        return quoted[1:-1].decode()
    name: str = json.loads(quoted)
    return name


def _twice() -> Exception:
    return bad_request("A name comes twice in the request body.")


def _said(error: Exception) -> str:
    return str(error).removeprefix("JSON is malformed: ")
