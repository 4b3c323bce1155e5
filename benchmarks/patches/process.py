"""A process that has some patches applied and steps its engines on order: a fork of one that has imported vLLM."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from benchmarks.patches.engines import SCENARIOS, Engine
from pdserve.patches.registry import find

_PR_SET_PDEATHSIG = 1


class Side:
    """One of two that are compared. Owns its process, which ends with `close`, or with this one."""

    def __init__(self, patches: Sequence[str]) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, tuple(patches)), daemon=True)
        self._process.start()
        there.close()

    def steps(self, scenario: str, number: int) -> int:
        """Takes that many steps; ns of the CPU for all."""
        return int(self._ask("steps", scenario, number))

    def operations(self, scenario: str, number: int) -> int:
        """Takes that many steps and counts the bytecodes that the interpreter executes in them."""
        return int(self._ask("operations", scenario, number))

    def close(self) -> None:
        # Not by the end of the pipe: processes that were forked later have it open, too.
        self._pipe.send(None)
        self._process.join()

    def _ask(self, *order: Any) -> Any:
        self._pipe.send(order)
        return self._pipe.recv()


def _serve(pipe: Any, patches: tuple[str, ...]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for name in patches:
        find(name).apply()
    engines: dict[str, Engine] = {}
    makers = {scenario.name: scenario.make for scenario in SCENARIOS}
    while (order := pipe.recv()) is not None:
        kind, scenario, number = order
        if scenario not in engines:
            engines[scenario] = makers[scenario](patches)
        engine = engines[scenario]
        # As EngineCore does once it is up; here also because a collection would hit whichever step it likes.
        gc.collect()
        gc.freeze()
        gc.disable()
        pipe.send(sum(engine.step() for _ in range(number)) if kind == "steps" else _operations(engine, number))
        gc.enable()


def _operations(engine: Engine, number: int) -> int:
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
