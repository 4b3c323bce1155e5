"""A program for the interpreter that has lmcache: replays a log of lookups in LMCache's cache simulator.

It reads a request (JSON) from its stdin and prints the answer as its last line. It needs lmcache and the standard
library only, because the engines' environment may be another one than pdserve's; its source is given with `-c`. The
interface is that of lmcache 0.5.6 (lmcache/tools/cache_simulator/simulator.py: load_lookup_events and simulate).
"""

import json
import sys
import warnings
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

_SIMULATOR = "lmcache.tools.cache_simulator.simulator"
STEP = 2**0.25
"""Between one size of L1 and the next."""
LOOK_SECONDS = 1.0
"""LMCache looks so often whether L1 is full to its watermark (0.5.6, L1EvictionController)."""


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """`paths`: files, or folders of them. `model`: the one whose lookups count, where the log has it. `chunk_bytes`:
    of a chunk in L1. `shares`: of L1 that are full of chunks, from right after an eviction to where one begins; it gets
    fuller by what comes until LMCache looks.
    `points`: how many sizes, from the one that holds all chunks downwards. `sizes`: further ones, in bytes."""
    simulator = _simulator()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        events = simulator.load_lookup_events([Path(path) for path in request["paths"]])
    models = sorted({str(event.get("model_name", "")) for event in events})
    wanted = request["model"] if request["model"] in models else models[0] if len(models) == 1 else None
    events = [event for event in events if event.get("model_name", "") == wanted]
    unique = len({digest for event in events for digest in event.get("chunk_hashes", ())})
    result: dict[str, Any] = {
        "models": models,
        "model": wanted,
        "chunk_sizes": sorted({int(event.get("chunk_size", 0)) for event in events}),
        "requests": len(events),
        "tokens": sum(event.get("seq_len", 0) for event in events),
        "chunks": unique,
        "warnings": [str(warning.message) for warning in caught],
        "sizes": [],
    }
    if unique:
        low, high = request["shares"]
        rates: dict[int, float] = {}

        def rate(size: float) -> float:
            # The size that holds all of them is a quotient: a rounding error must not take one away.
            capacity = max(1, int(size / request["chunk_bytes"] + 1e-6))
            if capacity not in rates:
                replayed = simulator.simulate(
                    events, capacity * request["chunk_bytes"], request["chunk_bytes"], fast=True
                )
                rates[capacity] = float(replayed["token_hit_rate"])
            return rates[capacity]

        times = [event.get("timestamp", 0.0) for event in events]
        seconds = max(times) - min(times)
        looked_up = sum(len(event.get("chunk_hashes", ())) for event in events)
        chunk_tokens = result["chunk_sizes"][0]

        def fullest(size: float) -> float:
            missed = looked_up - rate(size * high) * result["tokens"] / max(chunk_tokens, 1)
            arriving = missed / seconds * LOOK_SECONDS if seconds > 0 else 0.0
            return float(min(1.0, high + max(0.0, arriving) * request["chunk_bytes"] / size))

        whole = unique * request["chunk_bytes"] / low
        sizes = [*(whole / STEP**step for step in range(request["points"])), *request["sizes"]]
        result["sizes"] = [
            {"bytes": size, "low": rate(size * low), "high": rate(size * fullest(size))}
            for size in sorted(set(sizes))
            if size * low >= request["chunk_bytes"]
        ]
        result["best"] = rate(whole * low)
    return result


def _simulator() -> Any:
    """Raises ImportError."""
    try:
        _without_torch("lmcache")
        return import_module(_SIMULATOR)
    except (AttributeError, ImportError):  # a version whose simulator needs more of the package
        for name in [name for name in sys.modules if name.partition(".")[0] == "lmcache"]:
            del sys.modules[name]
        return import_module(_SIMULATOR)


def _without_torch(package: str) -> None:
    """Its modules can be imported, and its own file is not run: LMCache's imports torch and its kernels, which takes
    five seconds and may need a device's driver. The simulator needs neither."""
    spec = find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError(f"No module named {package!r}")
    hollow = ModuleType(package)
    hollow.__spec__, hollow.__path__ = spec, spec.submodule_search_locations
    sys.modules[package] = hollow


def main() -> None:
    """A failure that can be named is an answer too."""
    try:
        installed = version("lmcache")
    except PackageNotFoundError:
        installed = None
    try:
        result = answer(json.load(sys.stdin))
    except ImportError as error:
        result = {"lacks": str(error)}
    except (AttributeError, KeyError, TypeError, ValueError, UnicodeError) as error:
        result = {"unreadable": f"{type(error).__name__}: {error}"}
    print()
    print(json.dumps({"lmcache": installed, **result}))


if __name__ == "__main__":
    main()
