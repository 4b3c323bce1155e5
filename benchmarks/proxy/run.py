"""Rounds: in each, every system is started anew and every scenario visits all of them, a few times, in a turning
order."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.proxy.connections import LoadError
from benchmarks.proxy.meter import Meter, rss_mib
from benchmarks.proxy.results import Sample
from benchmarks.proxy.scenarios import Bench, Scenario, Size
from benchmarks.proxy.soak import soak
from benchmarks.proxy.systems import Cores, Mock, System, start

Log = Callable[[str], None]


@contextmanager
def quiet_collector() -> Any:
    """No garbage collection while a window is open: what is measured makes no cycles, and a pause would be a delay."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def measure(
    scenario: Scenario, system: System, mock: Mock, size: Size, number: int, rss_start: float, visit: int = 0
) -> Sample:
    """`number`: of the round."""
    assert mock.process.pid
    meter = Meter(system.pid, (os.getpid(), mock.process.pid))
    bench = Bench(mock, system, meter, size, number * size.visits + visit, rss_start)
    try:
        with quiet_collector():
            figures = uvloop.run(scenario.measure(bench))
    except (LoadError, OSError) as error:
        return Sample(number, scenario.name, system.name, {}, error=str(error), visit=visit)
    if visit:
        figures = {name: value for name, value in figures.items() if not name.startswith("rss_")}
    usage = bench.usage()
    return Sample(number, scenario.name, system.name, figures, usage.foreign, usage.waited, visit=visit)


def run_rounds(
    names: Sequence[str],
    scenarios: Sequence[Scenario],
    size: Size,
    cores: Cores,
    folder: Path,
    log: Log,
    retries: int = 0,
) -> list[Sample]:
    """A sample with foreign load is taken again, `retries` times at most. StartError: a system does not start."""
    samples: list[Sample] = []
    os.sched_setaffinity(0, {cores.harness})
    for number in range(size.rounds):
        with ExitStack() as stack:
            mock = Mock.start(cores)
            stack.callback(mock.stop)
            systems = []
            for name in names:
                system = start(name, mock, cores, folder)
                stack.callback(system.stop)
                systems.append((system, rss_mib(system.pid) if system.pid else 0.0))
            for turn, (scenario, visit) in enumerate(product(scenarios, range(size.visits))):
                at = (number + turn) % len(systems)
                for system, rss_start in systems[at:] + systems[:at]:
                    for _ in range(1 + retries):
                        sample = measure(scenario, system, mock, size, number, rss_start, visit)
                        samples.append(sample)
                        log(f"round {number + 1}/{size.rounds}  {describe(sample)}")
                        if sample.clean:
                            break
            log_refused(mock, log)
    return samples


def log_refused(mock: Mock, log: Log) -> None:
    stats = mock.stats()
    if stats["refused"]:
        log(f"the mock refused {stats['refused']} requests, the last because: {stats['why']}")


def run_soak(names: Sequence[str], size: Size, cores: Cores, folder: Path, log: Log) -> list[dict[str, Any]]:
    """One system after the other, each on a fresh mock. StartError, LoadError."""
    rows = []
    os.sched_setaffinity(0, {cores.harness})
    for name in names:
        with ExitStack() as stack:
            mock = Mock.start(cores)
            stack.callback(mock.stop)
            system = start(name, mock, cores, folder)
            stack.callback(system.stop)
            row = uvloop.run(soak(mock, system, size))
            rows.append(row)
            log_refused(mock, log)
            log(f"soak  {name}: " + ", ".join(f"{key} {value:.1f}" for key, value in row.items() if "mib" in key))
    return rows


def describe(sample: Sample) -> str:
    head = f"{sample.scenario:22} {sample.system:12}"
    if sample.error:
        return f"{head} FAILED: {sample.error}"
    figures = "  ".join(f"{name} {value:.4g}" for name, value in list(sample.figures.items())[:7])
    mark = "" if sample.clean else f"  [others: {sample.foreign:.1f} CPUs, waited {sample.waited:.1f}]"
    return f"{head} {figures}{mark}"
