"""Find the members of a JSON object in its bytes, and refuse a name that comes twice.

msgspec gives the last value of a name that comes twice, and drops the others. So the members that it gave are looked
for in the bytes of the object: when these are nothing else, none was dropped.
"""

from __future__ import annotations

import json
import re
from typing import Final

import msgspec

from pdserve.pd.errors import bad_request
from pdserve.pd.requests.scan import MemberSpan

Members = dict[str, msgspec.Raw]
"""Name -> the value as it was sent."""

_JOINED_BYTES: Final = 16_384
"""Up to here members are checked by a copy of the object, which costs less than a look at each of them."""
_KEY: Final = re.compile(rb'[ \t\r\n]*("(?:[^"\\]|\\.)*")[ \t\r\n]*:[ \t\r\n]*', re.S)
_SEPARATOR: Final = re.compile(rb"[ \t\r\n]*([,}])")
_COLON: Final = b":"
_COLON_BLANK: Final = b": "
_COMMA: Final = b","
_COMMA_BLANK: Final = b", "
_EMPTY: Final = b""
_LONGEST_NAME: Final = 1024
"""Characters, as in a body that is read in steps. To compare a long one with how it is spelled takes long."""
_LONGEST_KEPT: Final = 64
"""Characters of a name: clients choose them, and must not choose what we remember."""
_MOST_KEPT: Final = 1024
_QUOTED: Final[dict[str, bytes]] = {}


def spans_of(raw: bytes, members: Members, compared: dict[str, int]) -> list[MemberSpan]:
    """Return the span of each member of the object `raw`, in order. `compared`: where large values stand that were cut
    out of it before the others were read; empty: all were read in one. Raises ApiError 400 when a name comes twice."""
    # Where the first name ends, if it has no colon itself: what is guessed wrong is walked slowly.
    colon = raw.find(b":")
    separator = 2 if raw[colon + 1 : colon + 2] == b" " else 1
    if len(raw) <= _JOINED_BYTES:
        spans = _together(raw, members, separator)
    else:
        spans = _around_largest(raw, members, compared, separator)
    return _step(raw, members) if spans is None else spans


def _together(raw: bytes, members: Members, separator: int) -> list[MemberSpan] | None:
    """Return the spans of a small object by putting its members together again, with separators of this length, as
    programs write them: compact, or with a blank after each. None: that does not make the object."""
    colon, comma = (_COLON, _COMMA) if separator == 1 else (_COLON_BLANK, _COMMA_BLANK)
    pieces: list[bytes] = []
    spans: list[MemberSpan] = []
    position = 1
    for name, value in members.items():
        quoted = quoted_name(name)
        piece = colon.join((quoted, value))
        end = position + len(piece)
        pieces.append(piece)
        spans.append(MemberSpan(name, position, position + len(quoted) + separator, end))
        position = end + separator
    return spans if b"{%b}" % comma.join(pieces) == raw else None


def _around_largest(raw: bytes, members: Members, compared: dict[str, int], separator: int) -> list[MemberSpan] | None:
    """Return the spans of a larger object, whose largest value L is not looked at again: to compare it takes as long as
    to copy it.

    What is before L, and what is behind it, is what the other members make, and L has the length that is left. That is
    enough. If nothing was dropped, L is what is there. If something was, then in the place of L: a first value of its
    name, and the last one, which was read, begins behind that. Having the same length, it reaches into what is behind.
    It cannot be a string that does: each quote behind it would mean the opposite, up to the end of the object, which
    would be in a string. Nor can it be a list or an object: what is behind closes one bracket more than it opens, that
    of the object.

    That needs members that were read in one. Of values that were cut out before, only one that was compared with its
    place, or taken from it, may be L (`compared`).
    """
    spans: list[MemberSpan] = []
    position = 1
    place, size = -1, 0
    for name, value in members.items():
        begin = position + len(quoted_name(name)) + separator
        end = begin + len(memoryview(value))
        if end - begin > size:
            place, size = len(spans), end - begin
        spans.append(MemberSpan(name, position, begin, end))
        position = end + separator
    if place < 0 or position - separator + 1 != len(raw):
        return None
    largest = spans[place]
    if compared and compared.get(largest.name) != largest.value:
        return None
    colon, comma = (_COLON, _COMMA) if separator == 1 else (_COLON_BLANK, _COMMA_BLANK)
    pieces: list[bytes] = []
    for name, value in members.items():
        pieces.append(colon.join((quoted_name(name), _EMPTY if name == largest.name else value)))
    behind = comma.join((_EMPTY, *pieces[place + 1 :]))
    whole = raw.startswith(b"{%b" % comma.join(pieces[: place + 1])) and raw.endswith(b"%b}" % behind)
    return spans if whole else None


def _step(raw: bytes, members: Members) -> list[MemberSpan]:
    """Return the spans of any object. What msgspec took is walked along; a step that does not fit is a member that it
    has dropped, which only happens to one of two with the same name."""
    position = raw.index(b"{") + 1
    spans: list[MemberSpan] = []
    for name, value in members.items():
        if len(name) > _LONGEST_NAME:
            raise _long_name()
        key = _KEY.match(raw, position)
        assert key is not None
        start = key.start(1)
        if _name(key[1]) != name or not raw.startswith(value, key.end()):
            raise _twice()
        end = key.end() + len(memoryview(value))
        after = _SEPARATOR.match(raw, end)
        if after is None:
            raise _twice()
        spans.append(MemberSpan(name, start, key.end(), end))
        position = after.end()
        closed = after[1] == b"}"
        if closed and len(spans) < len(members):
            raise _twice()
    if spans and not closed:
        raise _twice()
    return spans


def value_behind(raw: bytes, name: str) -> int:
    """Return where the value of a member begins: the first thing in `raw` that looks like one of that name; -1:
    none."""
    at = raw.find(quoted_name(name))
    key = None if at < 0 else _KEY.match(raw, at)
    return -1 if key is None else key.end()


def quoted_name(name: str) -> bytes:
    """Return a member's name as programs write it, kept for the next one. Raises ApiError 400 when the name is very
    long."""
    known = _QUOTED.get(name)
    if known is not None:
        return known
    if len(name) > _LONGEST_NAME:
        raise _long_name()
    quoted = json.dumps(name, ensure_ascii=False).encode()
    # A client's names must not fill the memory.
    if len(name) <= _LONGEST_KEPT and len(_QUOTED) < _MOST_KEPT:
        _QUOTED[name] = quoted
    return quoted


def _name(quoted: bytes) -> str:
    if b"\\" not in quoted:
        return quoted[1:-1].decode()
    name: str = json.loads(quoted)
    return name


def _long_name() -> Exception:
    return bad_request(f"The request body has a name of more than {_LONGEST_NAME} characters.")


def _twice() -> Exception:
    return bad_request("A name comes twice in the request body.")
