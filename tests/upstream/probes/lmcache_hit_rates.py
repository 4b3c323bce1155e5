"""What a real LMCache server returns of prompts that come again and do not all fit in its L1, and its log of lookups.

`python -m tests.upstream.probes.lmcache_hit_rates L1_MIB FOLDER`: one engine (lmcache_bytes.py) sends REQUESTS prompts;
the answer has the server's own counters, and FOLDER its log.
"""

from __future__ import annotations

import json
import random
import sys
import time
import urllib.request
from itertools import pairwise

from tests.upstream.lmcache_engine import CHUNK, OURS
from tests.upstream.lmcache_server import Engine, Server, leaf, server

REQUESTS = 400
CHUNKS = 8
"""Of a prompt."""
PROMPTS = 100
SECONDS_EACH = 0.25
"""From one prompt to the next at least: LMCache looks once a second whether L1 is full enough for an eviction."""
_COUNTERS = {
    "requested": "lmcache_mp_lookup_requested_tokens_total",
    "returned": "lmcache_mp_lookup_hit_tokens_total",
}


def counters(at: Server) -> dict[str, float]:
    """The server's own."""
    with urllib.request.urlopen(f"http://127.0.0.1:{at.http_port}/metrics", timeout=60) as answer:  # loopback
        lines = answer.read().decode().splitlines()
    found = dict.fromkeys(_COUNTERS, 0.0)
    for line in lines:
        name, _, value = line.rpartition(" ")
        for ours, theirs in _COUNTERS.items():
            if name.partition("{")[0] == theirs:
                found[ours] += float(value)
    return found


def order(dice: random.Random) -> list[int]:
    """Prompts by their number: the first ones come often, the last ones seldom (Zipf, exponent 0.8)."""
    weights = [1 / (rank + 1) ** 0.8 for rank in range(PROMPTS)]
    return dice.choices(range(PROMPTS), weights, k=REQUESTS)


def main() -> None:
    """One run."""
    mib, folder = float(sys.argv[1]), sys.argv[2]
    dice = random.Random(7)
    prompts = [[dice.randrange(1000) for _ in range(CHUNKS * CHUNK + 8)] for _ in range(PROMPTS)]
    numbers = order(dice)
    objects: list[int] = []
    with server(l1_gb=mib / 1024, more=["--lookup-hash-log-dir", folder]) as at:
        engine = Engine(at, leaf(at, OURS), mark=1)
        for turn, number in enumerate(numbers):
            began = time.monotonic()
            engine.lab.add(f"r{turn}", prompts[number], max_tokens=1)
            engine.run()
            objects.append(at.figures()["objects"])
            time.sleep(max(0.0, SECONDS_EACH - (time.monotonic() - began)))
        found = counters(at)
        engine.close()
    evictions = sum(later < earlier for earlier, later in pairwise(objects))
    print(json.dumps({**found, "prompts": numbers, "loaded": engine.loaded, "evictions": evictions}))


if __name__ == "__main__":
    main()
