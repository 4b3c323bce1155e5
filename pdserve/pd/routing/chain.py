"""A sequence cut into blocks of one size, each named by a hash of it and all before it.

Two sequences have the same first n names exactly if their first n blocks are the same: a prefix is found by looking up
names, one a block. Python's own hash of bytes is keyed by a secret of the process, so a client cannot make two prompts
collide on purpose; by chance one of 10^6 blocks does with a probability below 10^-6. Names mean nothing outside the
process.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Container, Sequence
from functools import lru_cache

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


def names(parent: int, data: bytes, size: int, offset: int, blocks: int) -> list[int]:
    """Of `blocks` whole blocks from `offset` on, the first of them after the block `parent`."""
    hashes = []
    for block in _cutter(blocks, size).unpack_from(data, offset):
        parent = hash((parent, block))
        hashes.append(parent)
    return hashes


class Chain:
    """The names of the whole blocks of `data`, worked out as far as they are asked for."""

    __slots__ = ("_coarse", "_data", "_fine", "_names", "_size", "blocks")

    def __init__(self, data: bytes, size: int, fine: int | None = None, coarse: int = 1) -> None:
        """Blocks after the first `fine` ones are `coarse` times as large: of a megabyte it is not worth knowing to 256
        bytes where it differs, but every block costs."""
        self._data = data
        self._size = size
        self._coarse = coarse
        self._fine = len(data) // size if fine is None else min(fine, len(data) // size)
        self._names: list[int] = []
        self.blocks = self._fine + (len(data) - self._fine * size) // (size * coarse)

    def length(self, blocks: int) -> int:
        """In bytes, of so many blocks from the beginning on."""
        fine = self._fine
        return self._size * (blocks if blocks <= fine else fine + (blocks - fine) * self._coarse)

    def first(self, count: int) -> list[int]:
        """At most `count` names from the beginning on."""
        known = self._names
        count = min(count, self.blocks)
        while len(known) < count:
            self._grow()
        return known[:count]

    def held(self, by: Container[int]) -> int:
        """How many blocks from the beginning on are in `by`, without a gap."""
        known = self._names
        depth = 0
        while depth < self.blocks:
            if depth == len(known):
                self._grow()
            if known[depth] not in by:
                break
            depth += 1
        return depth

    def _grow(self) -> None:
        """By a few blocks of one size."""
        known = self._names
        done = len(known)
        fine = done < self._fine
        size = self._size if fine else self._size * self._coarse
        count = min(_STEP, (self._fine if fine else self.blocks) - done)
        known += names(known[-1] if known else ROOT, self._data, size, self.length(done), count)
