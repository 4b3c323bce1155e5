"""Run as a script by test_real.py in an interpreter with the engines: before and after `load`, as one JSON object.

The plugin is reached as vLLM reaches it: through the entry points of the installed distributions.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any


def attempt(call: Any) -> str:
    """`ok`, or the type and text of what was raised."""
    try:
        call()
    except (AssertionError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "ok"


def main() -> None:
    import torch
    from prometheus_client import Counter, Gauge, Histogram
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    children = [
        {"kv_connector": "MooncakeConnector", "kv_role": "kv_producer"},
        {"kv_connector": "NixlConnector", "kv_role": "kv_producer"},
    ]
    config = SimpleNamespace(
        kv_transfer_config=KVTransferConfig(
            kv_connector="MultiConnector", kv_role="kv_producer", kv_connector_extra_config={"connectors": children}
        )
    )
    metrics = multi_connector.MultiConnector.build_prom_metrics(
        config, {Gauge: Gauge, Counter: Counter, Histogram: Histogram}, ["engine"], {0: ["0"]}
    )
    seen: list[list[Any]] = []
    for child in metrics._prom_metrics.values():
        child.observe = lambda data, engine_idx=0: seen.append([data, engine_idx])

    (nixl,) = metrics._prom_metrics  # upstream's name for it differs between versions

    def observe() -> None:
        metrics.observe({"MooncakeConnector": {"transfers": 1}, nixl: {"transfers": 2}}, 7)

    before = {"observe": attempt(observe), "device": attempt(torch.accelerator.current_device_index)}
    seen.clear()
    os.environ["PDSERVE_PATCHES"] = "multiconnector-prom-metrics,mooncake-cpu-device"
    load_general_plugins()

    from pdserve.patches import effects, plugin

    plugin.load()
    after = {
        "observe": attempt(observe),
        "device": attempt(torch.accelerator.current_device_index),
        "set_device": attempt(lambda: current_platform.set_device(torch.accelerator.current_device_index())),
    }
    json.dump(
        {
            "registered": list(metrics._prom_metrics),
            "accelerator": torch.accelerator.is_available(),
            "before": before,
            "after": after,
            "seen": seen,
            "dropped": effects.totals()[("multiconnector-prom-metrics", "observations-dropped")],
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
