"""CPU and memory of the parts of a deployment, from /proc."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Use:
    """Processes, their CPU seconds since they began, and memory in MiB: what is theirs alone plus their part of what
    they share (PSS), for a single process its highest resident size."""

    processes: int
    cpu: float
    memory: float


@dataclass(frozen=True)
class PartsUse:
    launcher: Use
    agents: Use
    ways: Use


class Meter:
    """Of one launcher on this machine; its agents and their ways are in namespaces below it, which /proc shows too."""

    def __init__(self, launcher: int) -> None:
        self._launcher = launcher

    def read(self) -> PartsUse:
        agents, ways = [], []
        for folder in Path("/proc").iterdir():
            if not folder.name.isdecimal():
                continue
            try:
                argv = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"pdserve.node.agent" in argv and not argv[0].endswith(b"ssh"):
                agents.append(int(folder.name))
            elif argv[0].rpartition(b"/")[2] == b"ssh" or argv[0].startswith(b"sshd"):
                ways.append(int(folder.name))
        launcher = used([self._launcher])
        peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{self._launcher}/status").read_text())
        assert peak is not None
        return PartsUse(Use(1, launcher.cpu, int(peak.group(1)) / 1024), used(agents), used(ways))


def used(pids: list[int]) -> Use:
    """Of those that still live."""
    cpu = memory = 0.0
    count = 0
    for pid in pids:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
            shares = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        fields = stat[stat.rindex(")") + 2 :].split()
        cpu += (int(fields[11]) + int(fields[12])) / _TICK
        match = re.search(r"^Pss:\s+(\d+) kB", shares, re.MULTILINE)
        memory += int(match.group(1)) / 1024 if match else 0.0
        count += 1
    return Use(count, cpu, memory)
