"""What a deployment's processes hold while they are under load: descriptors, memory, KV."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from pdserve.system import procfs

_KV = re.compile(r"^vllm:kv_cache_usage_perc(?:\{[^}]*\})? (\S+)$", re.M)
_SECONDS = 30.0


@dataclass(frozen=True)
class Look:
    """At one moment."""

    seconds: float
    """Since the beginning."""
    descriptors: Mapping[str, int]
    """Of the process of the deployment's that has the most, by name in the plan."""
    memory: Mapping[str, int]
    """MiB resident, all processes of one."""
    kv: Mapping[str, float]
    """Share of the KV cache in use; only engines that have answered."""


class Watch:
    """`roots`: name -> PID of a process tree. `engines`: name -> URL."""

    def __init__(self, roots: Mapping[str, int], engines: Mapping[str, str]) -> None:
        self._roots, self._engines = roots, engines
        self._began = time.monotonic()
        self.looks: list[Look] = []

    async def look(self, client: httpx.AsyncClient) -> None:
        families = {name: {root, *procfs.descendants(root)} for name, root in self._roots.items()}
        kv = {}
        for name, url in self._engines.items():
            try:
                page = (await client.get(f"{url}/metrics", timeout=_SECONDS)).text
            except httpx.HTTPError:
                continue
            kv[name] = max(map(float, _KV.findall(page)), default=0.0)
        self.looks.append(
            Look(
                seconds=time.monotonic() - self._began,
                descriptors={name: max(map(_descriptors, family)) for name, family in families.items()},
                memory={name: sum(map(_resident, family)) for name, family in families.items()},
                kv=kv,
            )
        )

    async def until(self, client: httpx.AsyncClient, end: float, every: float) -> None:
        """A look every so many seconds until the end (time.monotonic)."""
        while True:
            await self.look(client)
            left = end - time.monotonic()
            if left <= 0:
                return
            await asyncio.sleep(min(every, left))


def _descriptors(pid: int) -> int:
    try:
        return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return 0


def _resident(pid: int) -> int:
    try:
        match = re.search(r"^VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.M)
    except OSError:
        return 0
    return int(match[1]) // 1024 if match else 0
