"""Folders that slurmd makes in the machine's freezer cgroup, the only thing of a cluster outside of its sandbox."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.cluster.machine import FREEZER

_GONE_SECONDS = 120.0


def cgroups(prefix: str) -> list[Path]:
    """Those of a cluster's nodes, the innermost first."""
    found: list[Path] = []
    for top in FREEZER.glob(f"slurm_{prefix}[0-9]*"):
        found += [Path(folder) for folder, _, _ in os.walk(top, topdown=False)]
    return found


def remove_cgroups(prefix: str) -> None:
    """Removes them as their processes end; raises OSError when some are still held after 20 s."""
    deadline = time.monotonic() + _GONE_SECONDS
    while left := cgroups(prefix):
        for folder in left:
            try:
                folder.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
                break
