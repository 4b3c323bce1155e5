"""The load: raw asyncio connections, in the same process for every system.

Every function ends with all its requests answered and its connections closed, and raises LoadError when a system drops
a connection or does not answer in time. Answers other than 200 are counted, not raised.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

from benchmarks.proxy.connections import Address, FirstByte, Repeating, Run, Streaming, connect
from benchmarks.proxy.meter import Meter


async def closed_loop(
    address: Address,
    requests: list[bytes],
    meter: Meter,
    *,
    connections: int,
    warm: float,
    seconds: float = 0,
    count: int = 0,
) -> Run:
    """For `seconds`, or for `count` requests."""
    run, source = Run(), cycle(requests)
    opened: list[Repeating] = []
    try:
        for _ in range(connections):
            opened.append(await connect(address, lambda: Repeating(run, source)))
        for connection in opened:
            connection.send(next(source))
        await run.sleep(warm)
        meter.start()
        run.recording = True
        if count:
            while run.done < count:
                await run.sleep(0.05)
        else:
            await run.sleep(seconds)
            await run.until(lambda: run.done >= connections, "one answer a connection")
        run.recording = False
        meter.stop()
        run.stop = True
        await run.until(lambda: not any(connection.waiting for connection in opened), "answers to the last requests")
    finally:
        run.close()
        for connection in opened:
            connection.close()
    return run


@dataclass(frozen=True)
class Streams:
    """What a run of streams adds to Run."""

    run: Run
    chunks: int
    """Received in all, outside the window too."""
    reads: int


async def streams(
    address: Address,
    requests: list[bytes],
    meter: Meter,
    *,
    count: int,
    settle: float,
    seconds: float,
    midway: Callable[[], None],
    go: Callable[[], object],
    finish: Callable[[], object],
) -> Streams:
    """`count` streams at once. `go` lets them run, `midway` is called inside the window, `finish` ends them."""
    run, source = Run(), cycle(requests)
    opened: list[Streaming] = []
    try:
        for _ in range(count):
            connection = await connect(address, lambda: Streaming(run))
            connection.send(next(source))
            opened.append(connection)
        await run.until(lambda: all(stream.began for stream in opened), "the first chunk of every stream")
        await asyncio.to_thread(go)
        await run.sleep(settle)
        meter.start()
        run.recording = True
        await run.sleep(seconds / 2)
        midway()
        await run.sleep(seconds / 2)
        run.recording = False
        meter.stop()
        await asyncio.to_thread(finish)
        await run.until(lambda: all(stream.ended for stream in opened), "the end of every stream")
    finally:
        run.close()
        for connection in opened:
            connection.close()
    return Streams(run, sum(stream.chunks for stream in opened), sum(stream.reads for stream in opened))


async def open_loop(
    address: Address, requests: list[bytes], meter: Meter, *, rate: float, count: int, warm: int, seed: int
) -> Run:
    """Streams that begin at random (Poisson) times, whatever the system does. The same `seed`, the same times."""
    run, source, chance = Run(), cycle(requests), random.Random(seed)  # noqa: S311
    opened: list[FirstByte] = []
    free: list[FirstByte] = []
    try:
        at = time.monotonic()
        for number in range(warm + count):
            at += chance.expovariate(rate)
            await run.sleep(max(0.0, at - time.monotonic()))
            if number == warm:
                run.recording = True
                meter.start()
            while free and free[-1].transport.is_closing():
                opened.remove(free.pop())
            if free:
                connection = free.pop()
            else:
                connection = await connect(address, lambda: FirstByte(run, free))
                opened.append(connection)
            connection.send(next(source))
        await run.until(lambda: len(free) == len(opened), "the end of every stream")
        meter.stop()
    finally:
        run.close()
        for stream in opened:
            stream.close()
    return run
