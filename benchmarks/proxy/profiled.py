"""A module run as by `python -m`, with cProfile between SIGUSR1 and SIGUSR2: a profile of serving, not of imports.

python -m benchmarks.proxy.profiled FILE MODULE [ARGUMENT...]
"""

from __future__ import annotations

import cProfile
import runpy
import signal
import sys
from pathlib import Path
from types import FrameType


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

    signal.signal(signal.SIGUSR1, begin)
    signal.signal(signal.SIGUSR2, end)
    sys.argv[:] = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
