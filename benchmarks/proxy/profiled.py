"""A module run as by `python -m`; a process that it forks is under cProfile between two signals, BEGIN and END: a
profile of serving, not of imports.

python -m benchmarks.proxy.profiled FILE MODULE [ARGUMENT...]
"""

from __future__ import annotations

import cProfile
import os
import runpy
import signal
import sys
from pathlib import Path
from types import FrameType

BEGIN, END = signal.SIGRTMIN, signal.SIGRTMIN + 1
"""The proxy itself uses SIGUSR2."""


def main() -> None:
    file, module = sys.argv[1:3]
    profiler = cProfile.Profile()

    def begin(_number: int, _frame: FrameType | None) -> None:
        profiler.enable()

    def end(_number: int, _frame: FrameType | None) -> None:
        profiler.disable()
        unfinished = Path(f"{file}.part")
        profiler.dump_stats(unfinished)
        unfinished.rename(file)

    def listen() -> None:
        signal.signal(BEGIN, begin)
        signal.signal(END, end)

    os.register_at_fork(after_in_child=listen)
    sys.argv[:] = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
