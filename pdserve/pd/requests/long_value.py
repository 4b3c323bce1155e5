"""The members of a body that one long value makes large. That value is read by simdjson, where it is installed.

msgspec skips over a string byte by byte and stumbles over each escape: 1 MB of text takes 0.4 to 6 ms. simdjson checks
a whole body of that size in 0.2 to 3 ms, but does not show where a value ends. That follows from what it does show: the
body is valid, and its members have these names in this order. It is slow at long numbers, of which 1 MB would take a
second: a body that seems to have them is left to msgspec, which does not work them out.
"""

from __future__ import annotations

from functools import cache
from random import random
from typing import TYPE_CHECKING, Any, Final

import msgspec

from pdserve.pd.requests.body import EASY_BYTES, IN_PLACE, MEMBERS, MembersAtOnce
from pdserve.pd.requests.member_spans import value_behind

if TYPE_CHECKING:
    from simdjson import Parser

LONG_BYTES: Final = 32_768
"""Of a body: below it msgspec alone is as fast."""
_OFTEN_LONG: Final = ("messages", "prompt", "input")
_MOST_NAMES: Final = 64
_MOST_BLANKS: Final = 64
"""Of what is looked at before a name."""
_BLANKS: Final = b" \t\r\n"
_LONG_NUMBER: Final = (0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7)
"""Places in it, in the order in which they are looked at: it has digits and at most a point at all of them. simdjson is
slow at numbers of 20 digits or more, up to 40 us for each."""
_IN_NUMBERS: Final = bytes(byte in b"0123456789." for byte in range(256))
_LEAST_STRIDE: Final = 301
_STRIDES: Final = 200
_SAMPLES: Final = 3


@cache
def _parser() -> Parser | None:
    """Return simdjson's parser, imported with the first long body: that takes 2 ms and 2 MB, and for later bodies it
    keeps up to 12 MB more. None: it is not installed (an image with the packages of vLLM, and pdserve mounted), or what
    is mounted was made for another machine."""
    try:
        from simdjson import Parser
    except (ImportError, RuntimeError):
        return None
    return Parser(EASY_BYTES)


def _names(raw: bytes) -> list[str] | None:
    """Return the names of the members of the object `raw`. None: it is none, has very many, is not valid, or has what
    simdjson refuses and other readers may not (numbers of more than 64 bits)."""
    parser = _parser()
    if parser is None or not raw.startswith(b"{"):
        return None
    try:
        document: Any = parser.parse(raw)
        # The next call of the parser needs that nothing refers to this document.
        return list(document) if len(document) <= _MOST_NAMES else None
    except (ValueError, RuntimeError):
        return None


def members_around_long(raw: bytes) -> MembersAtOnce | None:
    """Return the members of a body of LONG_BYTES to EASY_BYTES. None: it has to be read otherwise.

    A place is guessed for the long value: from behind the first mention of its name to before the last mention of the
    next one. It is right if the body with a number of ours in that place is an object whose members have the same
    names, and that one has the number. For then its begin is that of this member's value, in the object itself. Its end
    is in no string of the body: each quote behind it would mean the opposite, up to the end of the object, which would
    be in a string. What is behind it closes the one bracket of the object, in the body too: so the place is this value,
    or it and members behind it, and no name is missing. Where they stand is found as for any body (member_spans).
    """
    names = None if _has_long_numbers(raw) else _names(raw)
    if names is None:
        return None
    for name in names:
        if name in _OFTEN_LONG:
            break
    else:
        return None
    begin = value_behind(raw, name)
    following = names.index(name) + 1
    if following < len(names):
        end = _before(raw, raw.rfind(b'"%b"' % names[following].encode()), b",")
    else:
        end = _before(raw, len(raw), b"}")
    if begin < 0 or end - begin < max(LONG_BYTES, len(raw)) // 2:
        return None  # what is beside it would have to be read once more
    try:
        members = MEMBERS.decode(b"".join((raw[:begin], IN_PLACE, raw[end:])))
    except (msgspec.DecodeError, RecursionError):
        return None
    if list(members) != names or bytes(members[name]) != IN_PLACE:
        return None
    members[name] = msgspec.Raw(memoryview(raw)[begin:end])
    return MembersAtOnce(members, {name: begin})


def _has_long_numbers(raw: bytes) -> bool:
    """Return whether a sample of the body has long numbers, one place in some 160. What takes 5 ms is seen in 99 of 100
    cases. No body can be made to hide it: strides are drawn, several, for what comes again and again could fit one.
    Other text with 15 digits in a row is msgspec's then, too."""
    for _ in range(_SAMPLES):
        stride = _LEAST_STRIDE + 2 * int(random() * _STRIDES)  # noqa: S311
        first = int(random() * stride)  # noqa: S311
        places = -1
        for offset in _LONG_NUMBER:
            places &= int.from_bytes(raw[first + offset :: stride].translate(_IN_NUMBERS), "little")
            if not places:
                break
        else:
            return True
    return False


def _before(raw: bytes, at: int, byte: bytes) -> int:
    """Return the end of what precedes `byte`, the last one before `at`, blanks aside. -1: it is another byte, or not
    seen for blanks."""
    first = max(0, at - _MOST_BLANKS)
    piece = raw[first:at].rstrip(_BLANKS) if at >= 0 else b""
    if not piece.endswith(byte):
        return -1
    kept = piece[:-1].rstrip(_BLANKS)
    return first + len(kept) if kept else -1
