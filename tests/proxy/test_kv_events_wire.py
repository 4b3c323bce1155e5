"""KV events as vLLM encodes them: recorded bytes of several versions, and the classes of the one that is installed."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.pd.routing.kv_wire import AllBlocksCleared, BadEventsError, BlockRemoved, BlockStored, decode
from tests.proxy.rows import each

# Encoded with the classes in vllm/distributed/kv_events.py of each version: two blocks stored of which the second has
# a cache_salt, one removed, all cleared; by data parallel rank 3.
RECORDED = {
    "0.21.0": (
        "93cb3ff8000000000000939aab426c6f636b53746f72656492c4080101010101010101c4080202020202020202c0940b0c0d"
        "0e02c0a3475055c092c091a473616c740094ac426c6f636b52656d6f76656491c4080101010101010101a34750550091b041"
        "6c6c426c6f636b73436c656172656403"
    ),
    "0.22.1": (
        "93cb3ff8000000000000939cab426c6f636b53746f72656492c4080101010101010101c4080202020202020202c0940b0c0d"
        "0e02c0a3475055c092c091a473616c7400ae66756c6c5f617474656e74696f6ec094ac426c6f636b52656d6f76656491c408"
        "0101010101010101a34750550091b0416c6c426c6f636b73436c656172656403"
    ),
    "0.24.0": (
        "93cb3ff8000000000000938ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392c4080101010101"
        "010101c4080202020202020202b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473940b0c0d0eaa626c"
        "6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b6579"
        "7392c091a473616c74a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e"
        "74696f6e84a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391c4080101010101010101a66d65"
        "6469756da3475055a967726f75705f6964780081a474797065b0416c6c426c6f636b73436c656172656403"
    ),
    "0.33.0": (
        "93cb3ff800000000000093de000ea474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392c408010101"
        "0101010101c4080202020202020202b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473940b0c0d0eaa"
        "626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b"
        "65797392c091a473616c74a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474"
        "656e74696f6ea86c6f63616c697479a54c4f43414caa73657373696f6e5f6964a173b36c6f6f6b61686561645f746f6b656e"
        "5f69647391910184a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391c4080101010101010101"
        "a66d656469756da3475055a967726f75705f6964780081a474797065b0416c6c426c6f636b73436c656172656403"
    ),
}


@each("version", [*RECORDED])
def test_recorded_bytes(version: str) -> None:
    batch = decode(bytes.fromhex(RECORDED[version]))
    stored, removed, cleared = batch.events
    assert (batch.rank, batch.unknown) == (3, 0)
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == [b"\1" * 8, b"\2" * 8]
    assert stored.parent_block_hash is None
    assert (stored.token_ids, stored.block_size) == ([11, 12, 13, 14], 2)
    assert (stored.lora_id, stored.lora_name, stored.medium, stored.group_idx) == (None, None, "GPU", 0)
    assert stored.extra_keys == [None, ["salt"]]
    assert stored.kv_cache_spec_kind == (None if version == "0.21.0" else "full_attention")
    assert stored.lookahead_token_ids == ([[1]] if version == "0.33.0" else None)
    assert isinstance(removed, BlockRemoved)
    assert (removed.block_hashes, removed.medium, removed.group_idx) == ([b"\1" * 8], "GPU", 0)
    assert isinstance(cleared, AllBlocksCleared)


@pytest.mark.real
def test_the_installed_vllm_encodes_what_is_read_here() -> None:
    events = pytest.importorskip("vllm.distributed.kv_events", reason="NOT CHECKED against vLLM: it is not installed")
    stored = events.BlockStored(
        block_hashes=[b"a" * 32, 2**64 - 1],
        parent_block_hash=b"p" * 32,
        token_ids=list(range(32)),
        block_size=16,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        extra_keys=[None, (("image", 3), "salt")],
        group_idx=1,
        kv_cache_spec_kind="mla_attention",
        session_id="s",
    )
    removed = events.BlockRemoved(block_hashes=[b"a" * 32], medium="CPU", group_idx=1)
    sent = events.KVEventBatch(ts=1.0, events=[stored, removed, events.AllBlocksCleared()], data_parallel_rank=1)
    batch = decode(msgspec.msgpack.encode(sent))
    assert batch.rank == 1
    for event, original in zip(batch.events, sent.events, strict=True):
        assert type(event).__mro__[1].__name__ == type(original).__name__
        for field in event.__struct_fields__:
            value = getattr(original, field, None)
            assert getattr(event, field) == msgspec.msgpack.decode(msgspec.msgpack.encode(value)), field


@pytest.mark.real
def test_the_installed_vllm_has_no_event_that_is_unknown_here() -> None:
    events = pytest.importorskip("vllm.distributed.kv_events", reason="NOT CHECKED against vLLM: it is not installed")
    assert {kind.__name__ for kind in events.KVCacheEvent.__subclasses__()} == {
        "BlockStored",
        "BlockRemoved",
        "AllBlocksCleared",
    }


def test_a_batch_without_a_rank() -> None:
    assert decode(msgspec.msgpack.encode([1.0, []])).rank is None


def test_a_batch_as_a_map() -> None:
    batch = decode(msgspec.msgpack.encode({"ts": 1.0, "events": [["AllBlocksCleared"]], "data_parallel_rank": 2}))
    assert batch.rank == 2
    assert isinstance(batch.events[0], AllBlocksCleared)


@each("event", [["BlocksMoved", 1], {"type": "BlocksMoved", "to": 1}])
def test_an_event_of_an_unknown_type_is_left_out(event: object) -> None:
    batch = decode(msgspec.msgpack.encode([1.0, [event, ["AllBlocksCleared"]], 0]))
    assert (len(batch.events), batch.unknown) == (1, 1)


def test_fields_that_later_versions_add_are_ignored() -> None:
    removed = {"type": "BlockRemoved", "block_hashes": [b"a"], "medium": "GPU", "colour": "blue"}
    appended = ["BlockRemoved", [b"a"], "GPU", 0, "LOCAL", None, "blue"]
    batch = decode(msgspec.msgpack.encode([1.0, [removed, appended], 0, "blue"]))
    assert [type(event).__mro__[1] for event in batch.events] == [BlockRemoved, BlockRemoved]


@each(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1.0, [["BlockRemoved", "not a list", None]], 0]),
        msgspec.msgpack.encode([1.0, [{"type": "BlockStored", "block_hashes": [b"a"]}], 0]),
        msgspec.msgpack.encode([1.0, [{"type": 3}], 0]),
        msgspec.msgpack.encode([1.0, [[]], 0]),
        msgspec.msgpack.encode([1.0, [7], 0]),
        msgspec.msgpack.encode({"events": 3}),
    ],
)
def test_what_cannot_be_read_is_an_error(payload: bytes) -> None:
    with pytest.raises(BadEventsError):
        decode(payload)


@given(payload=st.binary(max_size=200))
def test_no_bytes_raise_anything_else(payload: bytes) -> None:
    with suppress(BadEventsError):
        assert isinstance(decode(payload).events, list)
