"""A process that has some patches applied and steps its engine on order: a fork of one that has imported vLLM."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import random
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from benchmarks.patches.callgrind import Collector
from benchmarks.patches.engines import SCENARIOS, Engine
from pdserve.patches.registry import find
from tests.upstream.engine_config import tiny_model

_PR_SET_PDEATHSIG = 1
_WARM_STEPS = 8
"""Before the first that counts: the interpreter has specialised its bytecodes by then."""


def prepare() -> None:
    """Before the forks: all that does not depend on patches is imported and built once, and the garbage collector
    never looks at it again. A fork is then ready in a tenth of the time."""
    tiny_model()
    for scenario in SCENARIOS:
        scenario.make(())
    gc.collect()
    gc.freeze()


class Side:
    """An engine of one scenario. Owns its process, which ends with `close`, or with this one.

    `layout`: seed of how the memory is used before the engine is made, so that no two have their objects at the same
    addresses; None leaves it as it is.
    """

    def __init__(self, patches: Sequence[str], scenario: str, layout: int | None) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, tuple(patches), scenario, layout), daemon=True)
        self._process.start()
        there.close()

    def step(self) -> int:
        """ns of the CPU."""
        self.order("step", 1)
        return self.answer()

    def order(self, kind: str, number: int) -> None:
        """`kind`: step (the answer is ns of the CPU), bytecodes or instructions; of all `number` steps."""
        self._pipe.send((kind, number))

    def answer(self) -> int:
        return int(self._pipe.recv())

    def close(self) -> None:
        # Not by the end of the pipe: processes that were forked later have it open, too.
        self._pipe.send(None)
        self._process.join()


def _serve(pipe: Any, patches: tuple[str, ...], scenario: str, layout: int | None) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    kept = [] if layout is None else _scattered(random.Random(layout))  # noqa: S311  (no secret)
    for name in patches:
        find(name).apply()
    engine = next(each for each in SCENARIOS if each.name == scenario).make(patches)
    for _ in range(_WARM_STEPS):
        engine.step()
    # As EngineCore does once it is up; here also because a collection would hit whichever step it likes.
    gc.collect()
    gc.freeze()
    gc.disable()
    while (order := pipe.recv()) is not None:
        kind, number = order
        count = {"step": _time, "bytecodes": _bytecodes, "instructions": _instructions}[kind]
        pipe.send(count(engine, number))
    kept.clear()


def _scattered(chosen: random.Random) -> list[bytes]:
    """Memory with holes at random places, which the engine's objects will fill; to be kept as long as they live."""
    kept = [bytes(chosen.randrange(480)) for _ in range(20_000)]
    chosen.shuffle(kept)
    del kept[chosen.randrange(len(kept)) :]
    return kept


def _time(engine: Engine, number: int) -> int:
    return sum(engine.step() for _ in range(number))


def _instructions(engine: Engine, number: int) -> int:
    """Only in a process that callgrind runs."""
    with Collector() as collector:
        for _ in range(number):
            engine.step(collector.toggle)
    return collector.collected


def _bytecodes(engine: Engine, number: int) -> int:
    counted = 0
    counting = False

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal counted
        if not counting:
            return None
        frame.f_trace_lines = False
        frame.f_trace_opcodes = True
        if event == "opcode":
            counted += 1
        return trace

    def clock() -> int:
        nonlocal counting
        counting = not counting
        return 0

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for _ in range(number):
            engine.step(clock)
    finally:
        sys.settrace(before)
    return counted
