"""The blocks of prompts that a worker was sent lately: only so many, the least recently used are forgotten."""

from __future__ import annotations


class RecentBlocks:
    """Names of blocks (routing.chain), in two halves. What is used is in the newer half; when that is full it becomes
    the older one, and what was only in the older one is forgotten. The names of a prompt are put in together: all
    blocks before a known one are known. That costs one call for a prompt, where an order of single names would cost two
    look-ups and a move for each.
    """

    __slots__ = ("_half", "_keeps_older", "_newer", "_older")

    def __init__(self, most: int) -> None:
        """Keep at most so many blocks, at least 1."""
        self._half = max(1, most // 2)
        self._keeps_older = most > 1
        self._newer: set[int] = set()
        self._older: set[int] = set()

    def __contains__(self, name: object) -> bool:
        return name in self._newer or name in self._older

    def __len__(self) -> int:
        """Different names."""
        return len(self._newer | self._older)

    def use(self, names: list[int]) -> None:
        """A prompt's, from its beginning on. Of one that does not fit into a half, the beginning is kept."""
        half = self._half
        if len(names) > half:
            names = names[:half]
        newer = self._newer
        if len(newer) + len(names) > half and len(newer) + len(set(names).difference(newer)) > half:
            self._older = newer if self._keeps_older else set()
            newer = self._newer = set()
        newer.update(names)
