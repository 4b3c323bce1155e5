"""The proxy's processes on one port: who makes them, what reaches all of them, and how they end.

The first process serves nothing. It holds the listening sockets, forks the others, passes the launcher's control lines
and what one of them asks (an admin's order) on to all, starts one anew that died or hangs, and ends them with itself.
A new one gets all control lines again that its siblings have, and takes the connections that waited for the one before.

A rolling restart (SIGUSR2, or {"restart": true, "config": "..."} among the control lines) makes the first process a
new program (`handover`): it forks new members, and when all of them serve the old ones stop accepting and end after
their last request. Nothing is refused meanwhile, because the sockets stay open. The same is done for one member that
gets a SIGTERM of its own: it asks for a successor. Its parent ends it by SIGINT.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import select
import selectors
import signal
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from pdserve.pd.processes import handover, heartbeat
from pdserve.pd.processes.child import MemberConfiguration, MemberProcess
from pdserve.pd.processes.control_lines import TOLD, ControlLines
from pdserve.pd.processes.handover import Inheritance
from pdserve.pd.processes.heartbeat import Beats, Vigil

_SHORT_SECONDS = 10.0
"""A life that is shorter is no sign that the next one will do better."""
_FIRST_SECONDS = 0.5
_LONGEST_SECONDS = 30.0


class Pauses:
    """Pauses of the places of all processes. The first short life costs nothing; from the second in a row on the pause
    doubles."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun: dict[int, float] = {}
        self._short: dict[int, int] = {}
        self._until: dict[int, float] = {}

    def begun(self, index: int) -> None:
        """A process has begun."""
        self._begun[index] = self._clock()
        self._until.pop(index, None)

    def ended(self, index: int) -> float:
        """It has ended. Seconds after which `due` names its place."""
        now = self._clock()
        lived = now - self._begun.get(index, 0.0)  # one of the program before had begun long ago
        short = self._short[index] = self._short.get(index, 0) + 1 if lived < _SHORT_SECONDS else 0
        seconds = 0.0 if short < 2 else min(_LONGEST_SECONDS, _FIRST_SECONDS * 2.0 ** (min(short, 32) - 2))
        self._until[index] = now + seconds
        return seconds

    def due(self) -> list[int]:
        """Places whose pause is over."""
        return [index for index, until in self._until.items() if until <= self._clock()]

    def forget(self) -> None:
        """No place waits any more."""
        self._until.clear()

    def left(self) -> float | None:
        """Seconds until a place is due; None: there is none."""
        return max(0.0, min(self._until.values()) - self._clock()) if self._until else None


log = logging.getLogger("pdserve.proxy")

RETIRE = signal.SIGUSR2
SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, RETIRE})
"""Blocked from the fork of a member until it handles them: one that comes earlier waits, and kills no process."""
_PR_SET_PDEATHSIG = 1
_READ_BYTES = 65536
_CHECK_SECONDS = 60.0
"""For the process that only looks whether a new program could start."""
_MAX_UNREAD = 1 << 22
"""Bytes of control lines that wait for a member which does not read them: with more it is killed and replaced."""

Member = Callable[[int, int, int], int]
"""(index, file descriptor of control lines, file descriptor of lines for all) -> exit code. Runs in a fork, and
unblocks SIGNALS once it handles them."""


class Processes:
    """The parent of `count` members. Must run before there is an event loop or a thread in this process."""

    def __init__(
        self,
        count: int,
        member: Member,
        stdin: int | None,
        config: MemberConfiguration,
        *,
        beats: Beats | None = None,
        sockets: Sequence[int] = (),
        inherited: Inheritance | None = None,
        configure: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`stdin`: where the launcher's control lines come from; None: there are none. `beats`: where members beat;
        None: no check whether they hang. `sockets`: the listening ones, which a new program gets too. `configure`
        gets the configuration that the launcher wants for the new program."""
        self.count = count
        self.member = member
        self.stdin = stdin
        self.config = config
        self.beats = beats
        self.sockets = sockets
        self.inherited = inherited
        self.configure = configure
        self.generation = 1
        self.rolling = False
        """Old members serve until all new ones do."""
        self._children: dict[int, MemberProcess] = {}
        self._lines = ControlLines()
        self._pauses = Pauses()
        self._ending = False
        self._code = 0
        self._partial = b""
        self._checking: int | None = None
        """The PID of the process that tries whether a new program could start."""
        self._check_until = 0.0
        self._refused = 0

    def run(self) -> int:
        """Supervise until all members have ended; return the exit code."""
        wake, waker = os.pipe()
        for end in (wake, waker):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        for signum in SIGNALS:
            signal.signal(signum, self._pass_on)
        signal.signal(signal.SIGCHLD, _ignore)
        with selectors.DefaultSelector() as selector:
            self._selector = selector
            selector.register(wake, selectors.EVENT_READ, lambda _: os.read(wake, _READ_BYTES))
            self._take_over()
            if self.stdin is not None:
                selector.register(self.stdin, selectors.EVENT_READ, self._read_stdin)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {*SIGNALS, signal.SIGCHLD})
            if self.inherited is not None and self.config.refused:
                self._keep_old()
                self._not_restarted(self.config.refused)
            else:
                for index in range(self.count):
                    self._fork(index)
            vigil = Vigil()
            while self._children or (self._pauses.left() is not None and not self._ending):
                for key, events in selector.select(self._longest_wait()):
                    key.data(events)
                self._reap()
                for index in self._pauses.due():
                    self._fork(index)
                self._end_hung(vigil)
        if self._checking is not None:
            self._end_check()  # again: the signal may have come while it was being started
            # No signal may find the PID of a process that has just been waited for.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            os.waitpid(self._checking, 0)
            self._checking = None
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return self._code

    def _longest_wait(self) -> float | None:
        """Return the seconds until something is to be looked at, whatever happens."""
        beat = None if self.beats is None else heartbeat.BEAT_SECONDS
        pause = None if self._ending else self._pauses.left()
        return min((seconds for seconds in (beat, pause) if seconds is not None), default=None)

    # --- lines

    def _read_stdin(self, _: int) -> None:
        assert self.stdin is not None
        data = os.read(self.stdin, _READ_BYTES)
        if not data:
            # The end of the channel means nothing: its owner stops us.
            self._selector.unregister(self.stdin)
            self.stdin = None
            return
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            message = self._lines.remember(line)
            if message.get("restart") is True:
                if isinstance(message.get("config"), str):
                    self.configure(message["config"])
                self._renew()
            else:
                self._broadcast(line)

    def _read_child(self, child: MemberProcess) -> None:
        data = os.read(child.asks, _READ_BYTES)
        if not data:
            self._selector.unregister(child.asks)
            return
        *lines, child.heard = (child.heard + data).split(b"\n")
        for line in lines:
            message = self._lines.remember(line)
            if message.get("serving") is True:
                child.serving = True
                self._retire_old()
                self._retire_predecessors(child)
            elif message.get("leaving") is True:
                self._replace(child)
            elif isinstance(message.get("runs_with"), str):
                self._runs_with(child, message["runs_with"].encode())
            else:
                self._broadcast(line, but=child)

    def _replace(self, child: MemberProcess) -> None:
        """It was told to end. In a rolling restart, or when all end, it is anyway."""
        if self._ending or self.rolling or child.leaving or child.retired:
            return
        log.info("proxy process %d (%d) was told to end: it serves until another one does", child.index, child.pid)
        child.leaving = True
        self._fork(child.index)

    def _retire_predecessors(self, child: MemberProcess) -> None:
        for other in self._children.values():
            if other.index == child.index and other.leaving and not other.retired:
                other.retired = True
                os.kill(other.pid, RETIRE)

    def has_predecessor(self, index: int) -> bool:
        """One that leaves still serves in this place."""
        return any(child.index == index and child.leaving and not child.retired for child in self._children.values())

    def _runs_with(self, child: MemberProcess, text: bytes) -> None:
        if not child.retired:
            self.config.now(text, old=child.old)
            log.info("proxy process %d has read its configuration again: a new one begins with it", child.index)

    def _broadcast(self, line: bytes, *, but: MemberProcess | None = None) -> None:
        for child in self._children.values():
            if child is not but:
                self._write(child, line)

    def _write(self, child: MemberProcess, line: bytes) -> None:
        """Never waits: one member that does not read must not hold up the others."""
        waiting = bool(child.unread)
        child.unread += line + b"\n"
        if len(child.unread) > _MAX_UNREAD:
            child.unread.clear()
            self._kill(child, "does not read its control lines")
        elif not waiting:
            self._flush(child)

    def _flush(self, child: MemberProcess) -> None:
        registered = child.control in self._selector.get_map()
        try:
            sent = os.write(child.control, child.unread)
        except BlockingIOError:
            sent = 0
        except BrokenPipeError:
            log.warning("a proxy process has just ended: its successor gets the control line")
            sent = len(child.unread)
        del child.unread[:sent]
        if child.unread and not registered:
            self._selector.register(child.control, selectors.EVENT_WRITE, lambda _: self._flush(child))
        elif registered and not child.unread:
            self._selector.unregister(child.control)

    # --- processes

    def _fork(self, index: int) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        if self._ending:
            # The signal came a moment ago: a member forked now would never get it.
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            return
        control_out, control_in = os.pipe()
        asks_out, asks_in = os.pipe()
        if self.beats is not None:
            self.beats.beat(index)
        pid = os.fork()
        if pid == 0:
            self._become(index, control_out, asks_in, (control_in, asks_out))
        child = MemberProcess(index, pid, control_in, asks_out, self.beats)
        self._adopt(child)
        self._pauses.begun(index)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(control_out)
        os.close(asks_in)
        for line in self._lines.again():
            self._write(child, line)
        if retiring := self._retiring():
            self._write(child, line_of({"retiring": retiring}).rstrip())
        self._write(child, TOLD)

    def _adopt(self, child: MemberProcess) -> None:
        os.set_blocking(child.control, False)
        self._children[child.pid] = child
        self._selector.register(child.asks, selectors.EVENT_READ, lambda _: self._read_child(child))

    def _become(self, index: int, control: int, asks: int, not_ours: tuple[int, ...]) -> None:
        """The member. Never returns."""
        code = 1
        try:
            # Members without their parent would hear of no death any more.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            # A Ctrl-C reaches the whole group of a terminal: members hear it from their parent, once.
            os.setpgid(0, 0)
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
            if sys.exc_info()[0] is not None:
                log.error("proxy process %d failed", index, exc_info=True)
            logging.shutdown()
            os._exit(code)

    def _reap(self) -> None:
        self._reap_check()
        for pid, child in list(self._children.items()):
            before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._hear_out(child)
                del self._children[pid]  # before a signal is passed on to whoever has its PID by then
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            if not ended:
                continue
            for end in (child.asks, child.control):
                if end in self._selector.get_map():
                    self._selector.unregister(end)
                os.close(end)
            if child.retired or child.old:
                self._broadcast(line_of({"retiring": self._retiring()}).rstrip())
            code = os.waitstatus_to_exitcode(status)
            if child.leaving:
                # It may have ended before it could say so; who has the address already hears nothing new.
                self._broadcast(line_of({"admin": "free"}).rstrip())
            if child.retired:
                log.info("the %s proxy process %d has ended", "old" if child.old else "new", child.index)
            elif self._ending:
                self._code = self._code or code
            elif child.old and self.rolling:
                log.error("the old proxy process %d ended (%d) before the new one served", child.index, code)
            elif child.leaving and any(other.index == child.index for other in self._all()):
                log.error("proxy process %d ended (%d) before its successor served", child.index, code)
            elif child.serving or self.has_predecessor(child.index) or (child.killed and not self.rolling):
                pause = self._pauses.ended(child.index)
                log.error("proxy process %d ended (%d): started anew%s", child.index, code, _in(pause))
            elif self.rolling:
                self._give_up(code)
            else:
                log.error("proxy process %d ended (%d) before it served: all end", child.index, code)
                self._code = code or 1
                self._end(signal.SIGTERM)

    def _hear_out(self, child: MemberProcess) -> None:
        """Read what a member that has ended had still to say: it may have served."""
        while child.asks in self._selector.get_map() and select.select([child.asks], [], [], 0)[0]:
            self._read_child(child)

    def _end_hung(self, vigil: Vigil) -> None:
        """A member whose event loop stands still serves nothing, and the kernel gives it its share of connections. One
        that does not serve yet has more time, for its imports."""
        vigil.look()
        for child in self._children.values():
            if child.beats is None:
                continue
            limit = heartbeat.HUNG_SECONDS if child.serving else heartbeat.STARTING_SECONDS
            if vigil.silent(child.beats.last(child.index)) > limit:
                child.beats.beat(child.index)
                silence = "has not answered" if child.serving else "has not begun to serve"
                self._kill(child, f"{silence} for {limit:.0f} s (stopped, or its loop is blocked)")

    def _kill(self, child: MemberProcess, why: str) -> None:
        log.error("proxy process %d (%d) %s: it is killed", child.index, child.pid, why)
        child.killed = True
        os.kill(child.pid, signal.SIGKILL)

    # --- signals

    def _pass_on(self, signum: int, _: FrameType | None) -> None:
        if signum == RETIRE:
            self._renew()
        elif signum == signal.SIGHUP:
            self._signal(signum)
        else:
            self._end(signum)

    def _end(self, signum: int) -> None:
        """Members know SIGINT: at the second one they end at once. Their SIGTERM is for one of them alone."""
        first, self._ending = not self._ending, True
        self._end_check()
        if first or signum == signal.SIGINT:
            self._signal(signal.SIGINT)

    def _signal(self, signum: int) -> None:
        for pid in self._children:
            os.kill(pid, signum)

    # --- the new program

    def _renew(self) -> None:
        if self._ending or self.rolling or self._checking is not None:
            return
        log.info("rolling restart: looking whether the new proxy could start")
        self._checking = handover.start_trial()
        self._check_until = time.monotonic() + _CHECK_SECONDS

    def _end_check(self) -> None:
        if self._checking is not None:
            os.kill(self._checking, signal.SIGKILL)

    def _retiring(self) -> int:
        """Processes that end what they have begun, or will: none of the others knows what that is."""
        return sum(child.old or child.retired for child in self._children.values())

    def _all(self) -> list[MemberProcess]:
        return list(self._children.values())

    def _reap_check(self) -> None:
        if self._checking is None:
            return
        # No signal may find the PID of a process that has just been waited for.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        ended, status = os.waitpid(self._checking, os.WNOHANG)
        if ended:
            self._checking = None
            if status == 0 and not self._ending:
                self._hand_over()  # a signal that comes from here on waits for the new program
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if not ended:
            if time.monotonic() > self._check_until:
                self._end_check()
        elif code := os.waitstatus_to_exitcode(status):
            self._not_restarted(f"it does not start (exit code {code})")

    def _hand_over(self) -> None:
        handover.hand_over(
            Inheritance(
                generation=self.generation,
                sockets=list(self.sockets),
                children=[child.heir() for child in self._all()],
                control_lines=[line.decode("latin-1") for line in self._lines.changes],
                states={name: line.decode("latin-1") for name, line in self._lines.states.items()},
                partial=self._partial.decode("latin-1"),
                stdin_ended=self.stdin is None,
                config=self.config.text.decode("latin-1"),
                shared=self.config.shared,
            ),
            {*SIGNALS, signal.SIGCHLD},
        )

    def _take_over(self) -> None:
        before = self.inherited
        if before is None:
            return
        self.generation = before.generation + 1
        states = {name: line.encode("latin-1") for name, line in before.states.items()}
        self._lines.take_over((line.encode("latin-1") for line in before.control_lines), states)
        self._partial = before.partial.encode("latin-1")
        if before.stdin_ended:
            self.stdin = None
        files = {heir.beats for heir in before.children if heir.beats is not None}
        signs = {file: Beats(file, self.count) for file in files}
        for heir in before.children:
            child = MemberProcess.inherited(heir, signs)
            self._adopt(child)
            self._flush(child)
        self.rolling = True

    def _give_up(self, code: int) -> None:
        """A new member does not live: the old ones go on, and the new ones that serve end what they have begun."""
        for child in self._children.values():
            if not child.old:
                child.retired = True
                os.kill(child.pid, RETIRE if child.serving else signal.SIGKILL)
        self._keep_old()
        self._broadcast(line_of({"retiring": self._retiring()}).rstrip())
        self._not_restarted(f"its processes end before they serve (exit code {code})")

    def _keep_old(self) -> None:
        """They are what serves, as if there had been no restart; those that died meanwhile are replaced."""
        self.rolling = False
        self._pauses.forget()  # of new members; an old one has their place
        self.config.go_back()
        for child in self._children.values():
            child.old = False
        serving = {child.index for child in self._children.values() if not child.retired}
        for index in set(range(self.count)) - serving:
            self._fork(index)

    def _not_restarted(self, why: str) -> None:
        self._refused += 1
        log.error("rolling restart: %s; the proxy that ran serves on", why)
        self._broadcast(line_of({"not_restarted": f"{self.generation}.{self._refused}: {why}"}).rstrip())

    def _retire_old(self) -> None:
        if not self.rolling or not all(child.serving for child in self._all() if not child.old):
            return
        if self._pauses.left() is not None:
            return  # until all places have one that serves
        self.rolling = False
        for child in self._children.values():
            if child.old and not child.retired:
                child.retired = True
                os.kill(child.pid, RETIRE)


def _in(seconds: float) -> str:
    return f" in {seconds:g} s, as its last lives were short" if seconds else ""


def line_of(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _ignore(_: int, __: FrameType | None) -> None:
    """Do nothing: the wake-up alone counts."""
