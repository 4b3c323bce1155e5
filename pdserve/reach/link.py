"""The launcher's end of a pipe to a program on a node: of any (`Channel`), and of an agent (`AgentLink`).

An agent and a node probe are such programs: JSON lines to their stdin, JSON lines from their stdout. What the lines
mean is theirs; how they travel is the same: nothing blocks the event loop, a line has a limit, and closing the pipe is
what makes the program leave.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pdserve.errors import AgentProtocolError, StartError
from pdserve.plan.node import (
    BEATS,
    Local,
    Node,
    Reach,
    Srun,
    agent_argv,
    has_lease,
    in_docker,
    reach_argv,
    step_name,
)
from pdserve.reach.containers import until_docker_hangs
from pdserve.reach.protocol import (
    NOT_HEARD,
    AgentMessage,
    Answered,
    Ask,
    Beat,
    Because,
    Event,
    Gone,
    Hello,
    Leaving,
    Method,
    Order,
    Pulse,
    SignalReceived,
    Start,
    Stop,
    decode_event,
    line_of,
)
from pdserve.reach.slurm import srun_environment
from pdserve.recipe.sections import Timeouts
from pdserve.system.pipe_writer import PipeWriter
from pdserve.system.process import pid_end, spawn_piped
from pdserve.time_limit import time_limit

LINE_BYTES = 16 * 1024 * 1024
"""A longer line ends the reading with ValueError."""
DOCKER_HANGS = "docker there does not answer, and its container has not come"
"""How an agent in docker was lost before its first word."""
_MANY_BYTES = 1024 * 1024
"""Of orders that an agent has not read: then none is sent that can be done without."""
_SHORTEST_SECONDS = 0.01
_ASK_MARGIN_SECONDS = 5.0
_EXIT_SECONDS = 3.0
"""How long a program whose pipe has closed gets to end, so that its exit code is known."""
_EVENT, _FAREWELL = b'{"event":', b'{"event":"leaving",'
"""How a line of an agent begins; neither stands within a text, where each quotation mark has a backslash."""
_SILENT_SECONDS = 5.0
"""What an agent that fell silent gets to leave in order, in case that only it was held up, before its way is cut."""


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
        environ: Mapping[str, str] = srun_environment(os.environ) if isinstance(reach, Srun) else os.environ
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
        """Return the code with which it ended, negative for a signal; None if it still lives after `seconds`."""
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


class AgentLink:
    """Sends orders and hands events to `receive`; reports Gone once, when the pipe closes or the agent falls silent.

    Closing it stops the node. Belongs to the event loop that runs when it is made.
    """

    def __init__(
        self,
        node: str,
        channel: Channel,
        receive: Callable[[Event], None],
        *,
        heartbeat: float | None = None,
        program: str | None = None,
        hang: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """`heartbeat`: seconds without a sign of life after which the agent is lost; None on this machine, where a pipe
        closes with its owner and a launcher that is held in a debugger must not end a deployment. `program`: what holds
        the agent, if its exit code has the reason for which it ended. `hang`: of the docker around it, returns once
        that answers nothing any more; it is asked before the first word, when there is no heartbeat to miss."""
        self.node = node
        self._program = program
        self._channel = channel
        self._receive = receive
        self._gone = False
        self.silent = False
        """It was lost without a word: what its node does is not known."""
        self._heard: float | None = None
        """Not before its first word: until then a container may still be on its way."""
        self._ordered: set[str] = set()
        """Processes that this agent was ordered to start or stop: it has no events of others."""
        self._asked: dict[int, asyncio.Future[Answered]] = {}
        self._ids = count(1)
        self._heartbeat = heartbeat
        self._beaten = asyncio.get_running_loop().time()
        self._held = (0.0, self._beaten)
        """For how long this process did not run the last time that it was held, and until when."""
        self._reader = asyncio.create_task(self._read())
        self._reader.add_done_callback(self._stopped_reading)
        self._waits = None if hang is None else asyncio.create_task(self._until_first_word(hang()))
        self._pulse = None if heartbeat is None else asyncio.create_task(self._keep_in_touch(heartbeat))

    def send(self, order: Order) -> None:
        """Sends one order; never blocks. An agent that is gone is reported by Gone, not here."""
        if isinstance(order, Start | Stop):
            self._ordered.add(order.process.name if isinstance(order, Start) else order.name)
        if isinstance(order, Beat) and self._channel.waiting > _MANY_BYTES:
            return  # what waits is the same sign of life
        self._channel.send(order)

    async def ask(
        self,
        method: Method,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: str | None = None,
        seconds: float,
    ) -> Answered:
        """One HTTP request, made from the agent's node. Never raises: an answer that cannot come has the reason."""
        order = Ask(id=next(self._ids), method=method, url=url, headers=dict(headers or {}), body=body, seconds=seconds)
        if self._gone:
            return Answered(id=order.id, status=None, error=f"the agent of {self.node} is gone")
        if self._channel.waiting > _MANY_BYTES:
            return Answered(id=order.id, status=None, error=f"the agent of {self.node} does not read its orders")
        answer: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        self._asked[order.id] = answer
        self.send(order)
        try:
            # Not wait_for, which Python 3.11 lets go on when it is cancelled at the moment at which it ends.
            async with time_limit(seconds + _ASK_MARGIN_SECONDS):
                return await answer
        except TimeoutError:
            return Answered(id=order.id, status=None, error=f"the agent of {self.node} did not answer")
        finally:
            self._asked.pop(order.id, None)

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        how = "its pipe closed"
        code: int | None = None
        try:
            # What stands in one piece with its farewell comes without a pause in which this task could be cancelled.
            while not self._gone and (line := await self._channel.line()):
                self._heard = loop.time()
                if self._waits is not None:
                    self._waits.cancel()
                if (message := self._decoded(line)) is None:
                    break
                self._received(message)
            if self._program is not None and (code := await self._channel.exit_code(_EXIT_SECONDS)) is not None:
                how = f"{self._program} ended with exit code {code}"
        except AgentProtocolError as error:
            how = error.render()
        finally:
            self._channel.close_reading()
        self._lost(how, exit_code=code)

    def _decoded(self, line: bytes) -> AgentMessage | None:
        """Decode a line; None: the agent ended in the middle of it, its last one. Its guard may have ended it with a
        farewell. Raises AgentProtocolError."""
        try:
            return decode_event(line, self.node)
        except AgentProtocolError:
            if (farewell := line.rfind(_FAREWELL)) > 0:
                return decode_event(line[farewell:], self.node)
            if line.endswith(b"\n") or not line.startswith(_EVENT[: len(line)]):
                raise
            return None

    def _received(self, message: AgentMessage) -> None:
        if isinstance(message, Answered):
            if (asked := self._asked.get(message.id)) is not None and not asked.done():
                asked.set_result(message)
        elif isinstance(message, Leaving):
            self._lost(message.how, because=message.because)
        elif not isinstance(message, Pulse):
            self._check_own(message)
            self._receive(message)

    def _check_own(self, event: Event) -> None:
        """AgentProtocolError: it speaks of a node or a process that is not its own."""
        if isinstance(event, Gone):
            whose = "the end of an agent, which only its link reports"
        elif isinstance(event, Hello | SignalReceived):
            whose = "" if event.node == self.node else f"the node {event.node}"
        else:
            whose = "" if event.name in self._ordered else f"{event.name}, which it was never ordered to start"
        if whose:
            raise AgentProtocolError(
                f"an agent reported {event.event} of {whose}",
                where=f"agent@{self.node}",
                cause="the command that starts the agent reaches another node, or another pdserve runs there",
                todo=f"compare the address of {self.node} with the host that answers there, and `pdserve --version`",
            )

    async def _until_first_word(self, hang: Coroutine[Any, Any, None]) -> None:
        await hang
        self.silent = True
        self._lost(DOCKER_HANGS)

    async def _keep_in_touch(self, heartbeat: float) -> None:
        loop, interval = asyncio.get_running_loop(), heartbeat / BEATS
        while not self._gone:
            self._beaten = loop.time()
            self.send(Beat())
            # Not later than the heartbeat after the last word, which came before whatever cut it off.
            due = interval if self._heard is None else self._heard + heartbeat - self._beaten
            await asyncio.sleep(max(_SHORTEST_SECONDS, min(interval, due)))
            # Time in which we ourselves were held (a full disk, a debugger) is no silence of the other side.
            held = max(0.0, loop.time() - self._beaten - 2 * interval)
            if held:
                self._held = (held, loop.time())
            if self._heard is None:
                continue
            self._heard += held
            if (silent := loop.time() - self._heard) > heartbeat:
                self.silent = True
                why = "the node or its network is down, or the agent hangs or gets no CPU"
                self._lost(f"{NOT_HEARD} {silent:.1f} s: {why}")

    def _lost(self, how: str, *, because: Because | None = None, exit_code: int | None = None) -> None:
        """Reports it once. The pipe is closed at once, so that an agent whose network comes back stops, and not before
        its lease is over."""
        if self._gone:
            return
        self._gone = True
        self._channel.hang_up()
        self._reader.cancel()
        if self._waits is not None and not self.silent:
            self._waits.cancel()
        for id_, asked in self._asked.items():
            if not asked.done():
                asked.set_result(Answered(id=id_, status=None, error=f"the agent of {self.node} is gone: {how}"))
        gone = Gone(node=self.node, how=how, because=because, exit_code=exit_code, held=self._held_lately())
        self._receive(gone)

    def _held_lately(self) -> float:
        """Seconds for which this process has just not run; 0 without a heartbeat."""
        if self._heartbeat is None:
            return 0.0
        now, (held, until) = asyncio.get_running_loop().time(), self._held
        # What came meanwhile may be read before the next beat is due.
        return max(now - self._beaten - self._heartbeat / BEATS, held if now - until < self._heartbeat else 0.0, 0.0)

    def _stopped_reading(self, reader: asyncio.Task[None]) -> None:
        """A reader that fails must not leave a launcher that sees nothing any more and believes that all is well."""
        if not reader.cancelled() and (error := reader.exception()) is not None:
            self._lost(f"its events can no longer be read: {error!r}")

    async def close(self, seconds: float) -> bool:
        """Closes the pipe and waits until the node's guard has left: nothing of ours runs there any more.

        False when it is still there after `seconds`. A guard is not killed, because it is the one that cleans up;
        killed is the srun or ssh of a node that was lost, which may wait for it for minutes; that of a silent one soon.
        """
        left = True
        try:
            async with time_limit(min(seconds, _SILENT_SECONDS) if self.silent else seconds):
                await self._channel.sent()
                self._channel.hang_up()
                await self._channel.left()
        except TimeoutError:
            left, lost = False, self._gone
            self._channel.hang_up()
            if lost and self._pulse is not None:
                await self._channel.kill()
        finally:
            tasks = [task for task in (self._reader, self._pulse, self._waits) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return left


def open_agent(
    node: Node, receive: Callable[[Event], None], *, run_dir: Path, run_id: str, timeouts: Timeouts
) -> AgentLink:
    """Start agent and guard, in a session of their own here, so that a Ctrl-C of the terminal is not their business.

    They end when the link is closed or this process dies. On another node, and in docker, whose daemon holds the pipe,
    that may not be seen: there they also end when they hear nothing for their lease. Raises StartError.
    """
    argv = agent_argv(node, run_dir=str(run_dir), run_id=run_id, timeouts=timeouts)
    log = run_dir / "logs" / f"agent@{node.name}.log"
    try:
        channel = Channel.open(node.reach, node.name, step_name(node.name), argv, log=log)
    except OSError as error:  # its log on a full disk, or no room for a process
        raise StartError(
            f"the agent of {node.name} cannot be started",
            where=f"agent@{node.name}",
            cause=str(error),
            todo=f"make room in {log.parent}; where a limit was reached, ulimit -u and ulimit -n show it",
        ) from error
    heartbeat = timeouts.heartbeat_seconds if has_lease(node) else None
    if not in_docker(node):
        return AgentLink(node.name, channel, receive, heartbeat=heartbeat)
    hang = partial(until_docker_hangs, node.reach, node.name, log.parent)
    program = "docker run" if isinstance(node.reach, Local) else f"docker run through {node.reach.kind}"
    return AgentLink(node.name, channel, receive, heartbeat=heartbeat, program=program, hang=hang)
