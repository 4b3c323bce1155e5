"""vLLM's KV events as they come over ZMQ: msgpack of [ts, [event, ...], data_parallel_rank].

Read in vLLM 0.21 to 0.33 (vllm/distributed/kv_events.py). There 0.21 and 0.22 encode an event as an array that begins
with its type, 0.24 and later as a map; a development version between them encoded the batch as a map too. All are read.
Fields that later versions add are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

BlockHash = bytes | int
"""bytes; int with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES."""


class BlockStored(msgspec.Struct, gc=False):
    """Blocks that became part of the cache, each the successor of the one before."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    """Before the first of them; None: it begins a prompt."""
    token_ids: list[int]
    """Of all of them together. Fewer hashes than this is long: blocks were left out (sliding window, Mamba), and which
    is not reported. Empty with block_size 0: an offloading connector that does not know them."""
    block_size: int
    """In tokens."""
    lora_id: int | None = None
    medium: str | None = None
    """GPU, CPU or STORAGE, in either case of letters; None: a version without offloading, so GPU."""
    lora_name: str | None = None
    extra_keys: list[list[object] | None] | None = None
    """For each block what its hash has beside token ids: LoRA, media, cache_salt (first block only), embeddings."""
    group_idx: int | None = None
    """KV cache group: hybrid models have several, each with its own blocks, hashes and events."""
    kv_cache_spec_kind: str | None = None
    """full_attention, sliding_window, mamba, ...; None in 0.21."""
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None
    """0.33 with some drafters: tokens after each block that its hash covers too."""


class BlockRemoved(msgspec.Struct, gc=False):
    """Blocks that were evicted."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, gc=False):
    """The prefix cache was reset."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class _StoredMap(BlockStored, tag="BlockStored"):
    pass


class _StoredArray(BlockStored, tag="BlockStored", array_like=True):
    pass


class _RemovedMap(BlockRemoved, tag="BlockRemoved"):
    pass


class _RemovedArray(BlockRemoved, tag="BlockRemoved", array_like=True):
    pass


class _ClearedMap(AllBlocksCleared, tag="AllBlocksCleared"):
    pass


class _ClearedArray(AllBlocksCleared, tag="AllBlocksCleared", array_like=True):
    pass


class _BatchArray(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class _BatchMap(msgspec.Struct):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


_BATCH_ARRAY = msgspec.msgpack.Decoder(_BatchArray)
_BATCH_MAP = msgspec.msgpack.Decoder(_BatchMap)
_EVENT_ARRAY: msgspec.msgpack.Decoder[_StoredArray | _RemovedArray | _ClearedArray]
_EVENT_ARRAY = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_EVENT_MAP: msgspec.msgpack.Decoder[_StoredMap | _RemovedMap | _ClearedMap]
_EVENT_MAP = msgspec.msgpack.Decoder(_StoredMap | _RemovedMap | _ClearedMap)
_TYPES = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})


@dataclass(frozen=True, slots=True)
class KvEventBatch:
    """The events of one step of a scheduler."""

    events: Sequence[Event]
    rank: int | None
    """Data parallel rank, if the engine reports it."""
    unknown: int
    """Events of types that are not known here, left out."""


class BadEventsError(ValueError):
    """A message is no batch of KV events. Its events are lost, so what is known of that cache may be wrong now."""


def decode(payload: bytes) -> KvEventBatch:
    """Raises BadEventsError."""
    try:
        raw = (_BATCH_MAP if _is_map(payload) else _BATCH_ARRAY).decode(payload)
        events: list[Event] = []
        for part in raw.events:
            event = _event(part)
            if event is not None:
                events.append(event)
    except msgspec.MsgspecError as error:
        raise BadEventsError(str(error)) from error
    return KvEventBatch(events, raw.data_parallel_rank, len(raw.events) - len(events))


def _event(part: msgspec.Raw) -> Event | None:
    """Return the event; None: its type is not known here."""
    is_map = _is_map(part)
    try:
        return _EVENT_MAP.decode(part) if is_map else _EVENT_ARRAY.decode(part)
    except msgspec.ValidationError:
        whole = msgspec.msgpack.decode(part)
        kind = whole.get("type") if isinstance(whole, dict) else whole[0] if isinstance(whole, list) and whole else None
        if isinstance(kind, str) and kind not in _TYPES:
            return None
        raise


def _is_map(data: bytes | msgspec.Raw) -> bool:
    """Return whether msgpack's first byte begins a map: fixmap, map 16, map 32."""
    first = memoryview(data)[:1].tobytes()
    return b"\x80" <= first <= b"\x8f" or first in (b"\xde", b"\xdf")
