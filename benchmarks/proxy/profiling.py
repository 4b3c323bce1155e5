"""Where pdserve's proxy spends its time in one scenario, by cProfile: trust the shares, not the times.

It is the interpreted one: cProfile sees nothing of what is compiled.
"""

from __future__ import annotations

import os
import pstats
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks.proxy.meter import rss_mib, tree
from benchmarks.proxy.profiled import BEGIN, END
from benchmarks.proxy.run import describe, measure
from benchmarks.proxy.scenarios import SCENARIOS, Size
from benchmarks.proxy.systems import Cores, Mock, StartError, start

LINES = 25
WRITTEN_WITHIN = 10.0


def profile(name: str, cores: Cores, folder: Path, size: Size) -> int:
    """StartError: no such scenario, or no profile of it. Of several processes that serve only one is seen."""
    scenario = next((item for item in SCENARIOS if item.name == name), None)
    if scenario is None:
        raise StartError(f"no such scenario: {name} (there are {', '.join(item.name for item in SCENARIOS)})")
    file = folder / "pdserve.prof"
    os.sched_setaffinity(0, {cores.harness})
    with ExitStack() as stack:
        mock = Mock.start(cores)
        stack.callback(mock.stop)
        wrap = (sys.executable, "-m", "benchmarks.proxy.profiled", str(file))
        system = start("pdserve-interpreted", mock, cores, folder, wrap=wrap)
        stack.callback(system.stop)
        assert system.process is not None
        rss_start = rss_mib(system.process.pid)
        member = tree(system.process.pid)[-1]
        os.kill(member, BEGIN)
        sample = measure(scenario, system, mock, size, 0, rss_start)
        os.kill(member, END)
        deadline = time.monotonic() + WRITTEN_WITHIN
        while not file.exists() and time.monotonic() < deadline and system.process.poll() is None:
            time.sleep(0.05)
    print(describe(sample))
    if not file.exists():
        raise StartError("the proxy wrote no profile")
    stats = pstats.Stats(str(file))
    stats.strip_dirs().sort_stats("tottime").print_stats(LINES)
    return 1 if sample.error else 0
