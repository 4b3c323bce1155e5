"""The near end of a program on a node: JSON lines to its stdin, JSON lines from its stdout.

An agent and a node probe are such programs. What the lines mean is theirs; how they travel is the same: nothing blocks
the event loop, a line has a limit, and closing the pipe is what makes the program leave.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel

from pdserve.plan.node import Reach, Srun, reach_argv
from pdserve.reach.slurm_variables import for_srun
from pdserve.system.pipe_writer import PipeWriter
from pdserve.system.process import pid_end, spawn_piped
from pdserve.time_limit import time_limit

LINE_BYTES = 16 * 1024 * 1024
"""A longer line ends the reading with ValueError."""


def line_of(message: BaseModel) -> bytes:
    """A message as it travels, line end included."""
    return message.model_dump_json().encode() + b"\n"


class Channel:
    """Belongs to the event loop that runs when it is made, and to its maker, who must end it with `hang_up` and wait
    with `left` or `kill`."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        """`popen`: with pipes on stdin and stdout."""
        assert popen.stdin is not None
        self._popen = popen
        self._writer = PipeWriter(popen.stdin.fileno())
        self._stream: asyncio.StreamReader | None = None
        self._transport: asyncio.BaseTransport | None = None

    @staticmethod
    def open(reach: Reach, node: str, name: str, argv: Sequence[str], *, log: Path) -> Channel:
        """Starts `argv` on a node, in a session of its own here. `name`: of the step where Slurm starts it; `log`: gets
        its stderr. Raises OSError when the way there (ssh, srun) cannot be run."""
        environ: Mapping[str, str] = for_srun(os.environ) if isinstance(reach, Srun) else os.environ
        return Channel(spawn_piped(reach_argv(reach, node, name, argv), env=environ, stderr=log))

    @property
    def waiting(self) -> int:
        """Bytes that the program has not read yet."""
        return self._writer.waiting

    def send(self, message: BaseModel) -> None:
        """Never blocks. A program that is gone is no error here: `line` then returns nothing."""
        self._writer.write(line_of(message))

    async def line(self) -> bytes:
        """The next line; empty when the program has closed its end. Raises ValueError for one above LINE_BYTES."""
        if self._stream is None:
            assert self._popen.stdout is not None
            stream = self._stream = asyncio.StreamReader(limit=LINE_BYTES)
            loop = asyncio.get_running_loop()
            self._transport, _ = await loop.connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(stream), self._popen.stdout
            )
        return await self._stream.readline()

    def close_reading(self) -> None:
        """No line is wanted any more."""
        if self._transport is not None:
            self._transport.close()
        elif self._popen.stdout is not None:
            self._popen.stdout.close()

    async def sent(self) -> None:
        """Returns once the kernel has taken everything, or the program has gone."""
        await self._writer.sent()

    def hang_up(self) -> None:
        """Closes the program's stdin, upon which it leaves; what waits is dropped. Safe to call again."""
        assert self._popen.stdin is not None
        self._writer.close()
        if not self._popen.stdin.closed:
            # Nothing is in the object's own buffer: the pipe writer writes to the descriptor.
            self._popen.stdin.close()

    async def exit_code(self, seconds: float) -> int | None:
        """With which it ended, negative for a signal; None if it still lives after `seconds`."""
        try:
            async with time_limit(seconds):
                await self.left()
        except TimeoutError:
            return None
        return self._popen.returncode

    async def left(self) -> None:
        """Returns once the process that was started here has ended."""
        if self._popen.poll() is None:  # once its end was seen, its PID may be another process's
            await pid_end(self._popen.pid)
            self._popen.poll()

    async def kill(self) -> None:
        """Kills the process that was started here: of a program on another node, its ssh or srun."""
        self._popen.kill()
        await self.left()
