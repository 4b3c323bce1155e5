"""KV blocks that no request may use: a transfer that was given up may still write into them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class Quarantine:
    """Holds one reference to each block in vLLM's BlockPool, so that the pool cannot hand it out again.

    By request id, because a connector reports no more than that when a transfer has ended. A block that others share (a
    local prefix) stays theirs: a reference more does not hide it from the prefix cache.
    """

    def __init__(self, pool: Any, *, on_change: Callable[[int], None]) -> None:
        """`pool`: BlockPool. `on_change` gets the number of blocks held, after every change."""
        self._pool = pool
        self._on_change = on_change
        self._held: dict[str, list[Any]] = {}
        self.request_ids = self._held.keys()
        """Of transfers that have not ended, as of now. Cheap to look at in every step."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    def __len__(self) -> int:
        """Transfers that have not ended."""
        return len(self._held)

    def hold(self, request_id: str, blocks: Iterable[Any]) -> None:
        """Takes KVCacheBlocks over. Call it before their request lets go of them; one transfer a request."""
        if request_id in self._held:
            raise ValueError(f"{request_id} has a transfer in quarantine already")
        # The null block stands for positions without KV, in every request.
        own = [block for block in blocks if not block.is_null]
        self._pool.touch(own)
        self._held[request_id] = own
        self._on_change(self.num_blocks)

    def release(self, request_id: str) -> None:
        """The transfer has ended: its blocks go back to the pool. They were never hashed, so none is a cache hit."""
        # The tail first, as vLLM frees a request: it is evicted before the prefix that others may want.
        self._pool.free_blocks(reversed(self._held.pop(request_id)))
        self._on_change(self.num_blocks)

    @property
    def num_blocks(self) -> int:
        """How many references are held."""
        return sum(len(blocks) for blocks in self._held.values())

    @property
    def block_ids(self) -> frozenset[int]:
        """The ids of all blocks that are held."""
        return frozenset(block.block_id for blocks in self._held.values() for block in blocks)
