"""A tool of a node (docker, df, ...) that is run to its end, beside any container of ours."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pdserve.plan.node import Reach, Srun, reach_argv
from pdserve.reach.slurm_variables import for_srun
from pdserve.system.process import spawn
from pdserve.time_limit import time_limit

_LOOK_SECONDS = 1.0
_STOP_SECONDS = 5.0
_OUTPUT_BYTES = 1 << 20


class ToolEnd(NamedTuple):
    """`code` None: it took longer than it was given. `text`: stdout and stderr."""

    code: int | None
    text: str


async def run_tool(
    reach: Reach,
    node: str,
    argv: Sequence[str],
    *,
    log: Path,
    marker: str,
    seconds: float,
    watch: Callable[[str], None] | None = None,
) -> ToolEnd:
    """Its output is in `log`; `watch` gets all of it, again and again while the tool runs. A tool that is given up, or
    whose caller is, is stopped here. Raises OSError when the way there (ssh, srun), or here the tool, cannot be run."""
    in_slurm = isinstance(reach, Srun)
    # With pyxis's options the step would be inside the container.
    bare = reach.model_copy(update={"options": ()}) if isinstance(reach, Srun) else reach
    environ: Mapping[str, str] = for_srun(os.environ) if in_slurm else os.environ
    begin = _size(log)
    whole = reach_argv(bare, node, f"image-{node}", argv)
    child = spawn(whole, env=environ, log=log, marker=marker, control_stdin=False)
    try:
        async with time_limit(seconds):
            while (ended := child.poll()) is None:
                try:
                    # Not wait_for, which Python 3.11 lets go on when it is cancelled at the moment at which it ends.
                    async with time_limit(_LOOK_SECONDS):
                        ended = await child.wait()
                    break
                except TimeoutError:
                    if watch is not None:
                        watch(_text(log, begin))
    except TimeoutError:
        return ToolEnd(None, _text(log, begin))
    finally:
        if child.poll() is None:
            await child.stop(_STOP_SECONDS)
    return ToolEnd(ended.code, _text(log, begin))


def _size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def _text(log: Path, begin: int) -> str:
    with log.open("rb") as file:
        file.seek(max(begin, _size(log) - _OUTPUT_BYTES))
        return file.read().decode(errors="replace")
