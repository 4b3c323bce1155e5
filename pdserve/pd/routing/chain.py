"""A sequence cut into blocks, each named by a hash of it and all before it.

Two sequences have the same first n names exactly if their first n blocks are the same: a prefix is found by looking up
names. They depend on a secret of the process and mean nothing outside it. By chance one of 10^6 blocks has the name of
another one with a probability below 10^-6; a client that brought that about would change which engine a request goes
to, or whether it goes through prefill, and no answer.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Container, Sequence
from functools import lru_cache
from typing import Final

from pdserve.pd.routing.block_hash import SECRET, digest

TOKEN_BYTES: Final = array("I").itemsize
ROOT: Final = 0
"""Stands before the first block."""
_STEP: Final = 64
FINE_BYTES: Final = 4096
"""Of a GrowingChain: as far as its blocks have one size."""
_FINE_BLOCKS: Final = 16


def pack(tokens: Sequence[int]) -> bytes | None:
    """Return the tokens as bytes; None: one of them cannot be a token id."""
    try:
        return array("I", tokens).tobytes()
    except (OverflowError, TypeError):
        return None


@lru_cache(maxsize=256)
def _cutter(blocks: int, size: int) -> struct.Struct:
    return struct.Struct(f"{size}s" * blocks)


def names(parent: int, data: bytes, size: int, offset: int, blocks: int) -> list[int]:
    """Return the names of `blocks` whole blocks from `offset` on, the first of them after the block `parent`."""
    hashes = []
    for block in _cutter(blocks, size).unpack_from(data, offset):
        parent = hash((parent, block))
        hashes.append(parent)
    return hashes


class Chain:
    """The names of the whole blocks of `data`, worked out as far as they are asked for."""

    __slots__ = ("_data", "_names", "_size", "blocks")

    def __init__(self, data: bytes, size: int) -> None:
        self._data = data
        self._size = size
        self._names: list[int] = []
        self.blocks = len(data) // size

    def first(self, count: int) -> list[int]:
        """Return at most `count` names from the beginning on."""
        known = self._names
        count = min(count, self.blocks)
        while len(known) < count:
            self._grow()
        return known[:count]

    def held(self, by: Container[int]) -> int:
        """Count the blocks from the beginning on that are in `by`, without a gap."""
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
        """Add a few blocks."""
        known = self._names
        done = len(known)
        count = min(_STEP, self.blocks - done)
        known += names(known[-1] if known else ROOT, self._data, self._size, done * self._size, count)


class GrowingChain:
    """The names of the blocks of `data` that grow with what is before them: of a megabyte it is not worth knowing to
    256 bytes where it differs, but every block costs.

    The first FINE_BYTES or a little less, and at least 16 blocks, are in blocks of `size`. Then they double whenever
    what is before them has doubled, so a block is at most an eighth of that. What is left behind the last whole block,
    less than another one, is in pieces, each a power of two times `size` and smaller than the one before: so the end of
    what was sent is known to `size` bytes, wherever it is, and what goes on from there is found to hold all of it.
    """

    __slots__ = ("_begin", "_data", "_ends", "_whole", "length", "names", "size")

    def __init__(self, data: bytes, size: int, begin: int = 0, end: int | None = None, root: int = SECRET) -> None:
        """Cut `data` into blocks, from `begin` to `end`. `root`: before its first block; chains of different roots have
        no name in common."""
        self.size = size
        self.length = length = (len(data) if end is None else end) - begin
        self._data = data
        self._begin = begin
        self._ends = _ends(size, length)
        """The ends of the blocks, from `begin` on, one of them beyond the data."""
        names: list[int] = []
        view = memoryview(data)
        parent, done = root, 0
        for stop in self._ends:
            if stop > length:
                break
            parent = digest(data, view, begin + done, begin + stop, parent)
            names.append(parent)
            done = stop
        self._whole = len(names)
        """How many of the names are those of blocks; the others are pieces."""
        step = (self._ends[self._whole] - done) // 2
        while step >= size:
            stop = done + step
            if stop <= length:
                parent = digest(data, view, begin + done, begin + stop, parent)
                names.append(parent)
                done = stop
            step //= 2
        self.names = names
        """From the beginning on."""

    def held(self, by: Container[int]) -> int:
        """Count the bytes from the beginning on that are in `by`. That must have no block without those before it."""
        names = self.names
        low, high = 0, self._whole
        while low < high:
            middle = (low + high) // 2
            if names[middle] in by:
                low = middle + 1
            else:
                high = middle
        if not low:
            return 0
        # What was sent before may have ended within the next block: its pieces.
        data, view, begin, length = self._data, memoryview(self._data), self._begin, self.length
        parent, done = names[low - 1], self._ends[low - 1]
        step = (self._ends[low] - done) // 2
        own = low if low == self._whole else len(names)
        while step >= self.size:
            stop = done + step
            if stop <= length:
                # Behind the last whole block, and as long as all match, they are the pieces of this one.
                name = names[own] if own < len(names) else digest(data, view, begin + done, begin + stop, parent)
                if name in by:
                    parent, done, own = name, stop, own + 1
                else:
                    own = len(names)
            step //= 2
        return done


_layouts: dict[int, list[int]] = {}
"""Ends of blocks by the size of the first one: a few, for sizes are settings. They grow with the longest data."""


def _ends(size: int, total: int) -> list[int]:
    """Return the ends of a GrowingChain's blocks, up to the first beyond `total`; perhaps more."""
    ends = _layouts.get(size)
    if ends is None:
        ends = _layouts[size] = [size]
    end = ends[-1]
    step, doubled = size, size * max(_FINE_BLOCKS, FINE_BYTES // size)
    while end <= total:
        while doubled <= end:
            step *= 2
            doubled *= 2
        end += step
        ends.append(end)
    return ends
