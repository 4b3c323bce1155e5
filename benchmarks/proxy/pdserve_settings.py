"""How pdserve's proxy is configured here: the one place for switching its features on.

A feature is a name and the keys that it adds to proxy.json (pdserve.pd.config.ProxyConfig), merged in order. The system
`pdserve` has all of them; `pdserve-without-NAME` has all but one, so that a feature's cost is the difference.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.proxy.wire import MODEL

Feature = Callable[[Path], dict[str, Any]]

FEATURES: dict[str, Feature] = {}
"""Name -> keys of proxy.json; the folder is the run's own, for files that a key needs (wire.API_KEY is what clients
send). For example: "keys": lambda folder: {"keys": {"file": str(write_keys(folder))}}."""

ENVIRONMENT = {"PDSERVE_ENGINE_KEY": "sk-engine-0123456789abcdef"}


def base(port: int, mock: dict[str, list[int]]) -> dict[str, Any]:
    """The engines behind Mooncake, and otherwise the defaults of a recipe."""
    workers = [
        {"name": f"{role}-{number}", "role": role, "url": f"http://127.0.0.1:{at}"}
        for role in ("prefill", "decode")
        for number, at in enumerate(mock[role])
    ]
    for worker, at in zip(workers, mock["bootstrap"], strict=False):
        worker["bootstrap_url"] = f"http://127.0.0.1:{at}"
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
    }


def environment() -> dict[str, str]:
    return {**os.environ, **ENVIRONMENT}


def proxy_json(port: int, mock: dict[str, list[int]], folder: Path, without: str | None) -> dict[str, Any]:
    """KeyError: there is no such feature to leave out."""
    if without is not None:
        FEATURES[without]
    keys = base(port, mock)
    for name, feature in FEATURES.items():
        if name != without:
            keys |= feature(folder)
    return keys
