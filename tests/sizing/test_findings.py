"""Each edge: crossed with the number that crosses it and a fix, and not crossed just before."""

from __future__ import annotations

from typing import Any

from tests.plan.kit import on_gpus, with_lmcache
from tests.sizing.kit import CONFIG, HYBRID, sizing, where
from tests.tables import each_row

LARGE_L1 = with_lmcache(l1_size_gb=2, chunk_size=256)
DRIVEN = with_lmcache(l1_size_gb=4, chunk_size=256, transfer_mode="lmcache_driven")


def test_a_request_that_does_not_fit() -> None:
    """2048 blocks of 128 tokens, of which vLLM keeps a block for itself."""
    assert where(sizing({"engine": {"args": {"max-model-len": 262016}}})) == []
    made = sizing({"engine": {"args": {"max-model-len": 262017}}})
    assert where(made) == [("error", "engine.args.max-model-len")] * 2
    assert "needs 2048 blocks, and a rank of prefill can use 2047" in made.crossings[0].what
    assert "to 262016 or less (engine.args.max-model-len)" in made.crossings[0].todo


def test_an_l1_that_is_written_and_not_read() -> None:
    """The engine holds 262,144 tokens; an L1 of 1 GiB as many, and evicts from 0.8 of them on."""
    made = sizing(with_lmcache(l1_size_gb=1, chunk_size=256))
    assert where(made) == [("warning", "lmcache.l1_size_gb")]
    assert "L1 keeps 209715 tokens" in made.crossings[0].what
    assert "l1_size_gb: 2" in made.crossings[0].todo


def test_an_l1_that_two_engines_write_and_neither_reads() -> None:
    """Each of them holds 262,144 tokens; an L1 that is enough for one is not for both."""
    two = {"prefill": {**LARGE_L1["prefill"], "instances": 2}}
    made = sizing(LARGE_L1 | two)
    assert where(made) == [("warning", "lmcache.l1_size_gb")]
    assert "the 2 engines of prefill beside it hold up to 524288 themselves" in made.crossings[0].what
    assert "read only by another engine, or after a restart" in made.crossings[0].what
    assert "l1_size_gb: 3" in made.crossings[0].todo
    assert where(sizing(with_lmcache(l1_size_gb=2.5, chunk_size=256) | two)) == []


def test_a_chunk_of_no_whole_blocks() -> None:
    made = sizing(with_lmcache(l1_size_gb=2, chunk_size=200))
    assert ("error", "lmcache.chunk_size") in where(made)
    assert "200 tokens does not consist of whole blocks of 128" in made.crossings[0].what
    assert made.crossings[0].todo == "write lmcache.chunk_size: 128"


def test_the_chunk_of_a_hybrid_fits_the_block_that_vllm_enlarges() -> None:
    made = sizing(DRIVEN, config=HYBRID)
    assert [role.block_size for role in made.roles] == [256, 256]
    larger = sizing({"engine": {"args": {"block-size": 512}}}, DRIVEN, config=HYBRID)
    assert ("error", "lmcache.chunk_size") in where(larger)
    on_a_gpu = sizing(on_gpus(), DRIVEN, config=HYBRID)
    assert where(on_a_gpu) == [("warning", "lmcache.chunk_size")], "the computed block is no certainty there"


def test_no_recurrent_state_without_prefix_caching() -> None:
    made = sizing({"engine": {"args": {"enable-prefix-caching": False}}}, DRIVEN, config=HYBRID)
    assert ("error", "prefill.args.enable-prefix-caching") in where(made)


def test_a_chunk_that_no_prompt_fills() -> None:
    """By the model's own length: a length that the recipe states is refused by the plan already."""
    made = sizing(LARGE_L1, config={**CONFIG, "max_position_embeddings": 256})
    assert ("error", "lmcache.chunk_size") in where(made)


@each_row("seconds, crossed", [(7199, False), (7200, True), (9000, True)])
def test_a_queue_longer_than_the_lease(seconds: float, crossed: bool) -> None:
    made = sizing(LARGE_L1, queue_seconds=seconds)
    assert bool(where(made)) == crossed
    if crossed:
        assert made.crossings[0].todo == f"write lmcache.l1_read_ttl_seconds: {2 * seconds}"


@each_row("decode_rate, starved", [(250, "decode"), (200, None), (161, None), (160, "prefill"), (100, "prefill")])
def test_a_ratio_that_starves_one_side(decode_rate: float, starved: str | None) -> None:
    """Prefill does one request a second."""
    load: dict[str, Any] = {"prompt_tokens": 1000, "output_tokens": 200, "prefill_rate": 1000}
    made = sizing(decode_rate=decode_rate, **load)
    assert made.balance is not None
    assert made.balance.starved == starved
    full = {"decode": "prefill", "prefill": "decode"}
    assert where(made) == ([] if starved is None else [("warning", f"{full[starved]}.instances")])


def test_an_l1_that_registers_too_slowly_counts_the_kv_too() -> None:
    rocm: dict[str, Any] = {
        "platform": "rocm",
        "engine": {"args": {"kv-cache-memory-bytes": 40 << 30}},
        "lmcache": {"l1_size_gb": 100, "transfer_mode": "lmcache_driven", "mq_timeout_seconds": 139, "chunk_size": 256},
        "prefill": {"connector": with_lmcache()["prefill"]["connector"]},
    }
    made = sizing(rocm)
    slow = [crossing for crossing in made.crossings if crossing.where == "lmcache.mq_timeout_seconds"]
    assert "140 GiB are pinned" in slow[0].what
    assert slow[0].todo == "write lmcache.mq_timeout_seconds: 300"
    rocm["lmcache"]["mq_timeout_seconds"] = 140
    assert ("warning", "lmcache.mq_timeout_seconds") not in where(sizing(rocm))
