"""What is measured. A scenario sets up the mock, puts one kind of load on one system and returns named figures."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from benchmarks.proxy import load, wire
from benchmarks.proxy.connections import LoadError, Run
from benchmarks.proxy.meter import Meter, Usage, rss_mib
from benchmarks.proxy.systems import Mock, System

Figures = dict[str, float]

PREFILL, ADMISSION = 0.050, 0.010
ARRIVALS_PER_SECOND = 60.0


@dataclass(frozen=True)
class Size:
    """How long everything takes. Times in seconds."""

    rounds: int
    visits: int
    """In a round a scenario comes to every system this often, always one system after the other: what a host does to a
    core changes within seconds, and then touches neighbours alike."""
    window: float
    warm: float
    arrivals: int
    """Requests of an open loop."""
    soak_requests: int
    soak_streams: int


SIZES = {
    "smoke": Size(rounds=1, visits=1, window=0.1, warm=0.02, arrivals=5, soak_requests=20, soak_streams=4),
    "quick": Size(rounds=1, visits=1, window=0.8, warm=0.2, arrivals=60, soak_requests=5_000, soak_streams=200),
    "full": Size(rounds=7, visits=3, window=0.7, warm=0.3, arrivals=100, soak_requests=100_000, soak_streams=1_000),
}


@dataclass(frozen=True)
class Bench:
    """What a scenario works on."""

    mock: Mock
    system: System
    meter: Meter
    size: Size
    seed: int
    """Of the times at which an open loop sends: the same for every system in a visit."""
    rss_start: float
    """MiB, when the system had answered its first request."""

    def usage(self) -> Usage:
        assert self.meter.usage is not None
        return self.meter.usage


Measure = Callable[[Bench], Coroutine[None, None, Figures]]


@dataclass(frozen=True)
class Scenario:
    name: str
    what: str
    measure: Measure


def _answered(run: Run) -> None:
    if run.refused:
        raise LoadError(f"{run.refused} answers were not 200")
    if not run.done:
        raise LoadError("nothing was answered inside the window")


def _requests(body: int, connections: int) -> Measure:
    async def measure(bench: Bench) -> Figures:
        bench.mock.configure({})
        requests = wire.chats(body, stream=False)
        size = bench.size
        run = await load.closed_loop(
            bench.system.address, requests, bench.meter, connections=connections, warm=size.warm, seconds=size.window
        )
        _answered(run)
        usage = bench.usage()
        figures = {
            "requests_per_s": run.done / usage.seconds,
            "latency_p50_ms": run.quantile_ms(0.5),
            "latency_p99_ms": run.quantile_ms(0.99),
        }
        if bench.system.pid is not None:
            figures["cpu_ms_per_request"] = usage.cpu * 1e3 / run.done
        return figures

    return measure


def _first_byte(prefill: float, admission: float) -> Measure:
    async def measure(bench: Bench) -> Figures:
        bench.mock.configure({"prefill": prefill, "admission": admission, "interval": 0.002, "chunks": 3})
        run = await load.open_loop(
            bench.system.address,
            wire.chats(512, stream=True),
            bench.meter,
            rate=ARRIVALS_PER_SECOND,
            count=bench.size.arrivals,
            warm=max(2, bench.size.arrivals // 10),
            seed=bench.seed,
        )
        _answered(run)
        return {"ttft_p50_ms": run.quantile_ms(0.5), "ttft_p99_ms": run.quantile_ms(0.99)}

    return measure


def _streams(count: int, per_second: float) -> Measure:
    async def measure(bench: Bench) -> Figures:
        bench.mock.configure({"interval": 1 / per_second, "chunks": 0, "hold": True})
        emitted = bench.mock.stats()["emitted"]
        pid = bench.system.pid
        rss: list[float] = []
        try:
            result = await load.streams(
                bench.system.address,
                wire.chats(512, stream=True),
                bench.meter,
                count=count,
                settle=bench.size.warm,
                seconds=bench.size.window,
                midway=lambda: rss.append(rss_mib(pid)) if pid else None,
                go=bench.mock.go,
                finish=bench.mock.finish,
            )
        finally:
            # Streams that a failed run has left.
            bench.mock.go()
            bench.mock.finish()
        run, usage = result.run, bench.usage()
        _answered(run)
        emitted = bench.mock.stats()["emitted"] - emitted
        if result.chunks != emitted:
            raise LoadError(f"the mock sent {emitted} chunks, {result.chunks} arrived")
        figures = {
            "offered_per_s": count * per_second,
            "delivered_per_s": run.done / usage.seconds,
            "delay_p50_ms": run.quantile_ms(0.5),
            "delay_p99_ms": run.quantile_ms(0.99),
            "chunks_per_read": run.done / max(1, result.reads),
        }
        if pid is not None:
            figures["cpu_s_per_1000_chunks"] = usage.cpu * 1e3 / run.done
            figures |= {"rss_start_mib": bench.rss_start, "rss_streams_mib": rss[0], "rss_after_mib": rss_mib(pid)}
        return figures

    return measure


SCENARIOS = (
    Scenario("requests", "512 B prompts, no stream, closed loop, 16 connections", _requests(512, 16)),
    Scenario("ttft", "512 B prompts, streams beginning at 60/s (Poisson), no prefill time", _first_byte(0, 0)),
    Scenario(
        "ttft-prefill",
        f"the same, {PREFILL * 1e3:.0f} ms of prefill and {ADMISSION * 1e3:.0f} ms of decode's own admission",
        _first_byte(PREFILL, ADMISSION),
    ),
    Scenario("streams-64-paced", "64 streams of 50 chunks/s", _streams(64, 50)),
    Scenario("streams-64-saturated", "64 streams of 1000 chunks/s", _streams(64, 1000)),
    Scenario("streams-512-paced", "512 streams of 25 chunks/s", _streams(512, 25)),
    Scenario("streams-512-saturated", "512 streams of 125 chunks/s", _streams(512, 125)),
    Scenario("body-1kB", "1 kB prompts, no stream, closed loop, 4 connections", _requests(1_000, 4)),
    Scenario("body-100kB", "the same, 100 kB", _requests(100_000, 4)),
    Scenario("body-1MB", "the same, 1 MB", _requests(1_000_000, 4)),
)
