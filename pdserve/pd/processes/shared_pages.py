"""A page for each process that the others may read: one writes its figures there, another adds all of them up."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence

_HEAD = 8
_TRIES = 5


class Pages:
    """The pages as the process `own` sees them."""

    def __init__(self, files: Sequence[int], own: int) -> None:
        self._files, self._own = files, own

    @staticmethod
    def create(count: int) -> list[int]:
        """File descriptors that forks inherit."""
        return [os.memfd_create("pdserve-proxy-page") for _ in range(count)]

    def write(self, data: bytes) -> None:
        """Replaces our page."""
        head = len(data).to_bytes(4, "little") + zlib.crc32(data).to_bytes(4, "little")
        os.pwrite(self._files[self._own], head + data, 0)

    def others(self) -> list[bytes]:
        """The pages of the other processes that have written one."""
        pages = [self._read(file) for number, file in enumerate(self._files) if number != self._own]
        return [page for page in pages if page is not None]

    def _read(self, file: int) -> bytes | None:
        for _ in range(_TRIES):
            head = os.pread(file, _HEAD, 0)
            if len(head) < _HEAD:
                return None
            data = os.pread(file, int.from_bytes(head[:4], "little"), _HEAD)
            if zlib.crc32(data) == int.from_bytes(head[4:], "little"):
                return data
            # It was being written.
        return None
