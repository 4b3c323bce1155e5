"""A sequence cut into blocks of one size, each named by a hash of it and all before it.

Two sequences have the same first n names exactly if their first n blocks are the same: a prefix is found by looking up
names, one a block. Python's own hash of bytes is keyed by a secret of the process, so a client cannot make two prompts
collide on purpose; by chance one of 10^6 blocks does with a probability below 10^-6. Names mean nothing outside the
process.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Container, Iterator, Sequence
from functools import lru_cache
from itertools import takewhile

TOKEN_BYTES = array("I").itemsize
ROOT = 0
"""Stands before the first block."""
_STEP = 64


def pack(tokens: Sequence[int]) -> bytes | None:
    """None when one of them cannot be a token id."""
    try:
        return array("I", tokens).tobytes()
    except (OverflowError, TypeError):
        return None


@lru_cache(maxsize=256)
def _cutter(blocks: int, size: int) -> struct.Struct:
    return struct.Struct(f"{size}s" * blocks)


def names(parent: int, data: bytes, size: int, offset: int, blocks: int) -> Iterator[int]:
    """Of `blocks` whole blocks from `offset` on, the first of them after the block `parent`."""
    for block in _cutter(blocks, size).unpack_from(data, offset):
        parent = hash((parent, block))
        yield parent


class Chain:
    """The names of the whole blocks of `data`, worked out as far as they are asked for."""

    __slots__ = ("_data", "_names", "_size", "blocks")

    def __init__(self, data: bytes, size: int) -> None:
        self._data = data
        self._size = size
        self._names: list[int] = []
        self.blocks = len(data) // size

    def first(self, count: int) -> list[int]:
        """At most `count` names from the beginning on."""
        known = self._names
        count = min(count, self.blocks)
        while len(known) < count:
            self._grow(min(_STEP, count - len(known)))
        return known[:count]

    def held(self, by: Container[int]) -> int:
        """How many blocks from the beginning on are in `by`, without a gap."""
        known = self._names
        depth = 0
        while True:
            if depth == len(known):
                if depth == self.blocks:
                    return depth
                self._grow(min(_STEP, self.blocks - depth))
            batch = known[depth : depth + _STEP]
            found = len(list(takewhile(by.__contains__, batch)))
            depth += found
            if found < len(batch):
                return depth

    def _grow(self, blocks: int) -> None:
        known = self._names
        parent = known[-1] if known else ROOT
        known.extend(names(parent, self._data, self._size, len(known) * self._size, blocks))
