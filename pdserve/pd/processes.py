"""Several proxy processes on one port: who makes them, what reaches all of them, and how they end.

The first process binds nothing and serves nothing. It forks the others, passes the launcher's control lines and what
one of them asks (an admin's order) on to all, starts one anew that died, and ends them with itself. A new one is told
everything again that its siblings know.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

log = logging.getLogger("pdserve.proxy")

SHORT_LIFE_SECONDS = 5.0
"""A process that ends sooner would only end again: then all end, and the supervisor sees it."""
SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Blocked from the fork of a member until it handles them: one that comes earlier waits, and kills nobody."""
_PR_SET_PDEATHSIG = 1
_READ_BYTES = 65536

Member = Callable[[int, int, int], int]
"""(index, file descriptor of control lines, file descriptor of lines for all) -> exit code. Runs in a fork, and
unblocks SIGNALS once it handles them."""


@dataclass
class _Child:
    index: int
    pid: int
    control: int
    """We write control lines here."""
    asks: int
    """What it wants everybody to hear comes from here."""
    born: float
    heard: bytes = b""


@dataclass
class Processes:
    """The parent of `count` members. Must run before there is an event loop or a thread in this process."""

    count: int
    member: Member
    stdin: int | None
    """Where the launcher's control lines come from; None: there are none."""
    _children: dict[int, _Child] = field(default_factory=dict)
    _told: list[bytes] = field(default_factory=list)
    """What a new member must hear."""
    _states: dict[str, bytes] = field(default_factory=dict)
    _ending: bool = False
    _code: int = 0
    _partial: bytes = b""

    def run(self) -> int:
        """Until all members have ended; the exit code."""
        wake, waker = os.pipe()
        for end in (wake, waker):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        for signum in SIGNALS:
            signal.signal(signum, self._pass_on)
        signal.signal(signal.SIGCHLD, _ignore)
        with selectors.DefaultSelector() as selector:
            self._selector = selector
            selector.register(wake, selectors.EVENT_READ, lambda: os.read(wake, _READ_BYTES))
            if self.stdin is not None:
                selector.register(self.stdin, selectors.EVENT_READ, self._read_stdin)
            for index in range(self.count):
                self._fork(index)
            while self._children:
                for key, _ in selector.select():
                    key.data()
                self._reap()
        return self._code

    # --- lines

    def _read_stdin(self) -> None:
        assert self.stdin is not None
        data = os.read(self.stdin, _READ_BYTES)
        if not data:
            # The end of the channel means nothing: its owner stops us.
            self._selector.unregister(self.stdin)
            return
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._remember(line)
            for child in self._children.values():
                _write(child.control, line)

    def _read_child(self, child: _Child) -> None:
        data = os.read(child.asks, _READ_BYTES)
        if not data:
            self._selector.unregister(child.asks)
            return
        *lines, child.heard = (child.heard + data).split(b"\n")
        for line in lines:
            self._remember(line)
            for other in self._children.values():
                if other is not child:
                    _write(other.control, line)

    def _remember(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            return
        if isinstance(message, dict) and isinstance(message.get("worker"), str):
            self._states[message["worker"]] = line
        elif isinstance(message, dict) and ("add" in message or "remove" in message):
            self._told.append(line)

    # --- processes

    def _fork(self, index: int) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        if self._ending:
            # Heard a moment ago: it would be told of no end.
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            return
        control_out, control_in = os.pipe()
        asks_out, asks_in = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._become(index, control_out, asks_in, (control_in, asks_out))
        child = _Child(index, pid, control_in, asks_out, time.monotonic())
        self._children[pid] = child
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(control_out)
        os.close(asks_in)
        self._selector.register(asks_out, selectors.EVENT_READ, lambda: self._read_child(child))
        for line in (*self._told, *self._states.values()):
            _write(control_in, line)

    def _become(self, index: int, control: int, asks: int, not_ours: tuple[int, ...]) -> None:
        """The member. Never returns."""
        code = 1
        try:
            # Members without their parent would hear of no death any more.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            for signum in SIGNALS | {signal.SIGCHLD}:
                signal.signal(signum, signal.SIG_DFL)
            self._selector.close()
            for other in self._children.values():
                os.close(other.control)
                os.close(other.asks)
            for end in not_ours:
                os.close(end)
            code = self.member(index, control, asks)
        finally:
            logging.shutdown()
            os._exit(code)

    def _reap(self) -> None:
        for pid, child in list(self._children.items()):
            before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._children[pid]  # before a signal is passed on to whoever has its PID by then
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            if not ended:
                continue
            if child.asks in self._selector.get_map():
                self._selector.unregister(child.asks)
            os.close(child.control)
            os.close(child.asks)
            code = os.waitstatus_to_exitcode(status)
            if self._ending:
                self._code = self._code or code
            elif time.monotonic() - child.born < SHORT_LIFE_SECONDS:
                log.error("proxy process %d ended at once (%d): all end", child.index, code)
                self._code = code or 1
                self._end(signal.SIGTERM)
            else:
                log.error("proxy process %d ended (%d): started anew", child.index, code)
                self._fork(child.index)

    def _pass_on(self, signum: int, _: FrameType | None) -> None:
        if signum == signal.SIGHUP:
            self._signal(signum)
        else:
            self._end(signum)

    def _end(self, signum: int) -> None:
        self._ending = True
        self._signal(signum)

    def _signal(self, signum: int) -> None:
        for pid in self._children:
            os.kill(pid, signum)


def line_of(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _write(control: int, line: bytes) -> None:
    try:
        os.write(control, line + b"\n")
    except BrokenPipeError:
        log.warning("a proxy process has just ended: it is told again when it is back")


def _ignore(_: int, __: FrameType | None) -> None:
    """Only the wake-up counts."""
