"""Reloads against a real LMCache server (the installed release, on CPU)."""

from __future__ import annotations

import random
from typing import Any

from tests.upstream.run import IN_RELEASE, INSTALLED_VLLM, on

if IN_RELEASE:
    from tests.upstream.lmcache_engine import CHUNK, OURS
    from tests.upstream.lmcache_server import Engine, Server, leaf

WORKLOADS = 8


@on(INSTALLED_VLLM)
def test_a_reload_writes_only_beyond_a_local_prefix_and_is_right_in_every_byte() -> None:
    """Also where that prefix ends inside a chunk, so nothing need be computed up to the boundary first: upstream's
    skip_first_n_tokens. In each step the engines assert every byte that is reloaded, attended to and stored, and that
    no block outside a reload changes; with caps and minima."""
    at = Server()
    try:
        at.begin()
        runs = [random_engines(at, seed) for seed in range(WORKLOADS)]
    finally:
        at.close()
    assert sum(tokens % CHUNK != 0 for run in runs for tokens in run) > 5


def random_engines(at: Any, seed: int) -> list[int]:
    """Engines one after another, whose prompts share what earlier ones have stored and what they have themselves: local
    tokens of each reload."""
    dice = random.Random(seed)
    stems = [[dice.randrange(1000) for _ in range(640)] for _ in range(3)]
    local: list[int] = []
    for mark in range(3):
        cap = dice.choice([0, 64, 128, 256])
        extra = {"pdserve.max_tokens_per_load": cap, "pdserve.min_load_tokens": min(cap, dice.choice([0, 64]))}
        engine = Engine(at, leaf(at, OURS, **extra))
        for number in range(8):
            stem = dice.choice(stems)
            prompt = stem[: dice.randrange(16, 640)] + [dice.randrange(1000) for _ in range(dice.randrange(1, 40))]
            engine.lab.add(f"s{seed}m{mark}r{number}", prompt, max_tokens=dice.choice([1, 5]))
            for _ in range(dice.choice([0, 2, 8])):
                engine.step()
        engine.run()
        assert engine.close() == 0, "locks that stay while it lives"
        local += engine.local_at_load
    assert local, f"seed {seed} reloads nothing"
    return local
