"""A large request body in the pieces from which it is made: the kernel takes them one after the other, so that the
megabyte which the client sent is copied into no leg's own body."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

LARGE: Final = 65_536
"""From here on a copy costs more than a longer list of buffers."""


class Pieces:
    """Bytes that lie in several places. `len` is that of all of them."""

    __slots__ = ("_length", "parts")

    def __init__(self, parts: Sequence[bytes | memoryview]) -> None:
        self.parts = parts
        self._length = sum(map(len, parts))

    def __len__(self) -> int:
        return self._length

    def __bytes__(self) -> bytes:
        return b"".join(self.parts)


Payload = bytes | Pieces
