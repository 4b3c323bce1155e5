"""How pdserve's proxy is configured here: the one place for switching its features on.

A feature is a name and the keys that it adds to proxy.json (pdserve.pd.config.proxy.ProxyConfig), merged in order. The
system `pdserve` has all of them; `pdserve-without-NAME` has all but one, so that a feature's cost is the difference.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from benchmarks.proxy.wire import API_KEY, MODEL

Feature = Callable[[Path], dict[str, Any]]


def _routing(folder: Path) -> dict[str, Any]:
    """Prefix-aware where the prefix cache saves work."""
    return {"routing": {"prefill": {"kind": "prefix_aware"}, "decode": {"kind": "least_loaded"}}}


def _kv_events(folder: Path) -> dict[str, Any]:
    """Exact: each prompt is tokenised by an engine and looked up in what prefills have said of their caches."""
    return {"routing": {"prefill": {"kind": "kv_events"}, "decode": {"kind": "least_loaded"}}}


def _keys(folder: Path) -> dict[str, Any]:
    """A hundred keys with limits; clients send one of them."""
    lines = []
    for number in range(100):
        key = API_KEY if number == 50 else f"another-{number}"
        lines.append(
            json.dumps(
                {
                    "name": f"team-{number}",
                    "sha256": sha256(key.encode()).hexdigest(),
                    "max_requests": 100_000,
                    "requests_per_minute": 100_000_000,
                }
            )
        )
    path = folder / "keys.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return {"auth": {"keys_file": str(path)}}


def _admission(folder: Path) -> dict[str, Any]:
    """Limits that are checked and never reached."""
    limits = {"max_requests": 100_000, "max_prompt_tokens_in_flight": 10**12, "max_kv_usage": 0.99}
    return {"admission": {"prefill": limits, "decode": limits}}


FEATURES: dict[str, Feature] = {
    "routing": _routing,
    "keys": _keys,
    "admission": _admission,
    "json-log": lambda folder: {"log": "json"},
}
"""Name -> keys of proxy.json; the folder is the run's own, for files that a key needs (wire.API_KEY is what clients
send). Breakers, health checks, metrics and the request log are always on."""

INSTEAD: dict[str, tuple[str, Feature]] = {"kv-events": ("routing", _kv_events)}
"""Another way of a feature, as the system `pdserve-with-NAME`: what it costs more."""


INTERPRETED = "interpreted"
"""The system `pdserve-interpreted`: the same, but the source itself in place of the compiled wheel."""


def variants() -> list[str]:
    """The systems by which a feature's cost is found."""
    return [
        "pdserve",
        *(f"pdserve-without-{name}" for name in FEATURES),
        *(f"pdserve-with-{name}" for name in INSTEAD),
        f"pdserve-{INTERPRETED}",
    ]


ENVIRONMENT = {"PDSERVE_ENGINE_KEY": "sk-engine-0123456789abcdef"}


def base(port: int, mock: dict[str, list[int]]) -> dict[str, Any]:
    """The engines behind Mooncake, and otherwise the defaults of a recipe."""
    workers = [
        {"name": f"{role}-{number}", "role": role, "url": f"http://127.0.0.1:{at}"}
        for role in ("prefill", "decode")
        for number, at in enumerate(mock[role])
    ]
    for worker, at, events in zip(workers, mock["bootstrap"], mock["events"], strict=False):
        worker["bootstrap_url"] = f"http://127.0.0.1:{at}"
        worker["kv_events_url"] = f"tcp://127.0.0.1:{events}"
    return {
        "host": "127.0.0.1",
        "port": port,
        "served_name": MODEL,
        "protocol": "mooncake",
        "workers": workers,
        "request_timeout_seconds": 600.0,
        "connect_timeout_seconds": 5.0,
        "drain_seconds": 2.0,
        "max_body_bytes": 64 * 2**20,
        # The mock has nothing to warm, and its counters are the benchmark's.
        "prewarm": False,
    }


def environment() -> dict[str, str]:
    """Without PYTHONPATH, which would put a source tree before what is installed."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | ENVIRONMENT


def proxy_json(port: int, mock: dict[str, list[int]], folder: Path, variant: str) -> dict[str, Any]:
    """`variant`: nothing, interpreted, without-FEATURE or with-OTHER. KeyError: there is no such thing."""
    features = dict(FEATURES)
    way, _, name = ("", "", "") if variant == INTERPRETED else variant.partition("-")
    if way == "without":
        del features[name]
    elif way == "with":
        replaced, feature = INSTEAD[name]
        features[replaced] = feature
    elif way:
        raise KeyError(variant)
    keys = base(port, mock)
    for feature in features.values():
        keys |= feature(folder)
    return keys
