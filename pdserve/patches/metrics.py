"""The effects of an engine's patches on its own /metrics, whichever of its processes counted them.

The API server reads the records of the processes of its session when it is scraped. It does so through
prometheus_client's default registry: with several API servers in front of one engine (--api-server-count) vLLM builds
another registry for every scrape, and the effects are then only in `pdserve status`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pdserve.patches.process_records import merged_effects, read_records
from pdserve.patches.registry import REGISTRY


def register(folder: str) -> None:
    """Registers the collector once in this process."""
    from prometheus_client import REGISTRY

    REGISTRY.register(EffectsCollector(Path(folder), os.getsid(0)))


class EffectsCollector:
    """A collector of prometheus_client: asked for its metrics at every scrape."""

    def __init__(self, folder: Path, session: int) -> None:
        self._folder = folder
        self._session = session

    def describe(self) -> list[Any]:
        """Nothing fixed: prometheus_client would otherwise scrape once to find the names."""
        return []

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        records = [record for record in read_records(self._folder) if record.session == self._session]
        processes = Counter(patch for record in records for patch in record.active)
        active = GaugeMetricFamily(
            "pdserve_patch_active_processes", "Processes of this engine in which a patch is active.", labels=["patch"]
        )
        for patch, number in sorted(processes.items()):
            active.add_metric([patch], number)
        labels = ["patch", "effect"]
        counters = CounterMetricFamily("pdserve_patch_effects", "What the patches did since the start.", labels=labels)
        gauges = GaugeMetricFamily("pdserve_patch_state", "What the patches hold right now.", labels=labels)
        goes_down = {(patch.name, name) for patch in REGISTRY for name in patch.gauges}
        for patch, effects in sorted(merged_effects(records).items()):
            for effect, value in sorted(effects.items()):
                (gauges if (patch, effect) in goes_down else counters).add_metric([patch, effect], value)
        yield from (active, counters, gauges)
