"""Remember which prompts are in whose KV cache, exactly as the engines' events report it.

Engines name blocks by hashes that only they can compute (seed, algorithm and extra keys differ). So each block gets a
name of ours, from its token ids and the name of its parent, at the moment that it is stored; the engine's hash only
links parents and removals to it. What cannot be named by token ids alone has no name and never matches: blocks with a
LoRA, media, a cache_salt or embeddings, everything after such a block, blocks whose hash also covers tokens after them
(0.33 with some drafters), and blocks whose parent is not known.

It errs to one side. It may not know of a block that is there: stored before the first event that was seen; its copy
evicted, because vLLM also reports the removal of one of two copies; in CPU memory or storage, which are not counted;
beyond the bound. A match is the engine's own, except in hybrid models: of them only groups with full attention are
counted, and a sliding window or Mamba state that is gone makes the engine compute more than this shows.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Final

from pdserve.pd.routing.ask import RoutingRequest
from pdserve.pd.routing.chain import ROOT, TOKEN_BYTES, names, pack
from pdserve.pd.routing.kv_wire import BlockHash, BlockRemoved, BlockStored, Event

_WHOLE_PREFIX: Final = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of KV cache groups whose every block is needed for a hit."""


class _Blocks:
    """One KV cache group of one rank, at one block size."""

    __slots__ = ("gone", "held", "names")

    def __init__(self) -> None:
        self.held: OrderedDict[BlockHash, int | None] = OrderedDict()
        """The engine's hash to our name; None: it has none."""
        self.gone: OrderedDict[BlockHash, int] = OrderedDict()
        """Names of blocks that were removed: a copy may live on, be a parent, and be stored again."""
        self.names: set[int] = set()
        """The names of those held."""

    def store(self, block: BlockHash, name: int | None) -> None:
        if name is None:
            # The same hash is the same content: what was known of it stays true.
            name = self.held.get(block, self.gone.get(block))
        self.gone.pop(block, None)
        self.held[block] = name
        self.held.move_to_end(block)
        if name is not None:
            self.names.add(name)

    def remove(self, block: BlockHash, remembered: int) -> None:
        name = self.held.pop(block, None)
        if name is None:
            return
        self.names.discard(name)
        self.gone[block] = name
        if len(self.gone) > remembered:
            self.gone.popitem(last=False)

    def drop_oldest(self) -> None:
        _, name = self.held.popitem(last=False)
        if name is not None:
            self.names.discard(name)


class _Rank:
    """The cache of one data parallel rank."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._groups: dict[int, dict[int, _Blocks]] = {}
        """By group, then by block size: a group has one, but for partial blocks of hybrid models."""
        self.size = 0

    def store(self, event: BlockStored) -> int:
        """Returns how many of its blocks have no name."""
        blocks = self._groups.setdefault(event.group_idx or 0, {}).setdefault(event.block_size, _Blocks())
        before = len(blocks.held)
        named = _named(event, blocks)
        for block, name in zip(event.block_hashes, named + [None] * len(event.block_hashes), strict=False):
            blocks.store(block, name)
        self.size += len(blocks.held) - before
        while self.size > self._max_blocks:
            max(self._all(), key=lambda some: len(some.held)).drop_oldest()
            self.size -= 1
        return len(event.block_hashes) - len(named)

    def remove(self, event: BlockRemoved) -> None:
        for blocks in self._groups.get(event.group_idx or 0, {}).values():
            before = len(blocks.held)
            for block in event.block_hashes:
                blocks.remove(block, self._max_blocks // 8)
            self.size -= before - len(blocks.held)

    def matched(self, ask: RoutingRequest) -> int:
        """Tokens; a prefix counts only as far as every group has it."""
        least: int | None = None
        for group in self._groups.values():
            most = 0
            for size, blocks in group.items():
                chain = ask.token_chain(size) if blocks.names else None
                if chain is not None:
                    most = max(most, chain.held(blocks.names) * size)
            least = most if least is None else min(least, most)
        return least or 0

    def _all(self) -> list[_Blocks]:
        return [blocks for group in self._groups.values() for blocks in group.values()]


class KvIndex:
    """The blocks that the workers of a pool hold. Fed by `KvSubscriber`, asked by the policy kv_events."""

    def __init__(self, max_blocks: int) -> None:
        """`max_blocks`: bound for each rank."""
        self._max_blocks = max_blocks
        self._workers: dict[str, dict[int, _Rank]] = {}
        self.counts: Counter[str] = Counter()
        """Blocks: stored, unnamed (stored, but not to be matched), ignored (not on the GPU, or of a group that is not
        counted), removed; clears and forgets."""

    def apply(self, worker: str, rank: int, events: Iterable[Event]) -> None:
        """The events of one batch, in their order."""
        ranks = self._workers.setdefault(worker, {})
        cache = ranks.get(rank)
        if cache is None:
            cache = ranks[rank] = _Rank(self._max_blocks)
        for event in events:
            if isinstance(event, BlockStored):
                if _on_gpu(event.medium) and event.kv_cache_spec_kind in _WHOLE_PREFIX:
                    self.counts["stored"] += len(event.block_hashes)
                    self.counts["unnamed"] += cache.store(event)
                else:
                    self.counts["ignored"] += len(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                if _on_gpu(event.medium):
                    self.counts["removed"] += len(event.block_hashes)
                    cache.remove(event)
            else:
                self.counts["clears"] += 1
                cache = ranks[rank] = _Rank(self._max_blocks)

    def forget(self, worker: str, rank: int | None = None) -> None:
        """All of a worker, or of one of its ranks."""
        ranks = self._workers.get(worker, {})
        for known in [known for known in ranks if rank in (None, known)]:
            del ranks[known]
            self.counts["forgets"] += 1
        if not ranks:
            self._workers.pop(worker, None)

    def matched(self, worker: str, ask: RoutingRequest) -> dict[int, int]:
        """Tokens of the prompt that each rank holds. Empty: nothing is known of this worker, or of the tokens."""
        ranks = self._workers.get(worker)
        if not ranks or ask.tokens is None:
            return {}
        return {rank: cache.matched(ask) for rank, cache in ranks.items()}

    def blocks(self, worker: str) -> int:
        """Remembered now as held, of all its ranks."""
        return sum(cache.size for cache in self._workers.get(worker, {}).values())


def _on_gpu(medium: str | None) -> bool:
    return medium is None or medium.upper() == "GPU"


def _named(event: BlockStored, blocks: _Blocks) -> list[int]:
    """Names of its first blocks, as many as token ids alone can name."""
    size, count = event.block_size, len(event.block_hashes)
    if size <= 0 or len(event.token_ids) != size * count or event.lora_id is not None or event.lora_name is not None:
        return []
    if event.lookahead_token_ids:
        return []
    if event.extra_keys is not None:
        if len(event.extra_keys) != count:
            return []
        count = next((index for index, keys in enumerate(event.extra_keys) if keys), count)
    parent: int | None = ROOT
    if event.parent_block_hash is not None:
        parent = blocks.held.get(event.parent_block_hash)
        if parent is None:
            parent = blocks.gone.get(event.parent_block_hash)
    packed = pack(event.token_ids)
    if parent is None or packed is None:
        return []
    return names(parent, packed, TOKEN_BYTES * size, 0, count)
