"""Does memory stay flat? Requests in numbers, then many streams, on a process that has already seen both."""

from __future__ import annotations

from typing import Any

from benchmarks.proxy import load, wire
from benchmarks.proxy.connections import LoadError
from benchmarks.proxy.meter import Meter, rss_mib
from benchmarks.proxy.scenarios import Size
from benchmarks.proxy.systems import Mock, System

ALLOWED = 0.05
"""Growth, as a share of what the warm process had: allocators move in steps of that order."""
STREAM_SECONDS = 2.0


async def soak(mock: Mock, system: System, size: Size) -> dict[str, Any]:
    """RSS in MiB: cold, warm (after a tenth of it all), after the requests, during and after the streams."""
    assert system.pid is not None
    pid = system.pid
    cold = rss_mib(pid)
    await _requests(mock, system, max(10, size.soak_requests // 10))
    await _streams(mock, system, size.soak_streams)
    warm = rss_mib(pid)
    await _requests(mock, system, size.soak_requests)
    after_requests = rss_mib(pid)
    during = await _streams(mock, system, size.soak_streams)
    after_streams = rss_mib(pid)
    return {
        "system": system.name,
        "requests": size.soak_requests,
        "streams": size.soak_streams,
        "rss_cold_mib": cold,
        "rss_warm_mib": warm,
        "rss_after_requests_mib": after_requests,
        "rss_during_streams_mib": during,
        "rss_after_streams_mib": after_streams,
        "growth_requests_mib": after_requests - warm,
        "growth_streams_mib": after_streams - warm,
        "limit": ALLOWED * warm,
    }


async def _requests(mock: Mock, system: System, count: int) -> None:
    mock.configure({})
    meter = Meter(system.pid, ())
    requests = wire.chats(512, stream=False)
    run = await load.closed_loop(system.address, requests, meter, connections=16, warm=0, count=count)
    if run.refused:
        raise LoadError(f"{run.refused} answers were not 200")


async def _streams(mock: Mock, system: System, count: int) -> float:
    mock.configure({"interval": 0.05, "chunks": 0, "hold": True})
    during: list[float] = []
    assert system.pid is not None
    pid = system.pid
    result = await load.streams(
        system.address,
        wire.chats(512, stream=True),
        Meter(pid, ()),
        count=count,
        settle=0,
        seconds=STREAM_SECONDS,
        midway=lambda: during.append(rss_mib(pid)),
        go=mock.go,
        finish=mock.finish,
    )
    if result.run.refused:
        raise LoadError(f"{result.run.refused} answers were not 200")
    return during[0]
