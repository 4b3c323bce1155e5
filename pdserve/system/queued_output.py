"""Output that never holds up who writes it: a terminal that stands still (Ctrl-S, a pager, a stalled ssh) or a pipe
that nobody reads would stop an event loop at its next line.

A thread writes. What it cannot write yet waits; of more than that the oldest lines are dropped, and counted. No
PipeWriter: that makes its descriptor non-blocking, and a terminal is shared with the shell and the command of `run`.

Text is UTF-8 wherever we run (`ensure_utf8`), as it is in recipes, in JSON and in the output of engines.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, TextIO

_WAITING_BYTES = 1 << 18
_LAST_SECONDS = 5.0
"""What still waits at the end gets so long to be taken."""


class QueuedFile:
    """One open file with its thread. Written to by any thread."""

    def __init__(self, *, limit: int = _WAITING_BYTES) -> None:
        self._limit = limit
        self._news = threading.Condition()
        self._lines: deque[tuple[int, bytes]] = deque()
        self._size = 0
        self._dropped = 0
        self._over = False
        self._failure: OSError | None = None
        self._is_reported = False
        self._thread = threading.Thread(target=self._run, name="queued-output", daemon=True)
        self._thread.start()

    def put(self, descriptor: int, lines: bytes) -> None:
        """Queue whole lines, to be written in the order of the calls. Raises OSError, once, after a line that could not
        be written; nothing is written from there on."""
        with self._news:
            if self._failure is not None:
                if not self._is_reported:
                    self._is_reported = True
                    raise self._failure
                return
            for line in lines.splitlines(keepends=True):
                self._lines.append((descriptor, line))
                self._size += len(line)
            while self._size > self._limit:
                self._size -= len(self._lines.popleft()[1])
                self._dropped += 1
            self._news.notify()

    def end(self, seconds: float) -> OSError | None:
        """Wait until all is written, for so many seconds at most or until a Ctrl-C. Returns a failure that was not
        raised yet."""
        with self._news:
            self._over = True
            self._news.notify()
        with contextlib.suppress(KeyboardInterrupt):  # the wait is over, and nothing else
            self._thread.join(seconds)
        with self._news:
            self._lines.clear()
            return None if self._is_reported else self._failure

    def _run(self) -> None:
        # A signal is for the main thread, which may wait in a call that only its own signals interrupt.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            while (chosen := self._next()) is not None:
                _write(*chosen)
        except OSError as failure:
            with self._news:
                self._failure = failure
                self._lines.clear()

    def _next(self) -> tuple[int, bytes] | None:
        """Return what is to be written next. None: nothing will be."""
        with self._news:
            while not self._lines:
                if self._over:
                    return None
                self._news.wait()
            if self._dropped:
                text = f"({self._dropped} lines are missing here: this output was not read)\n"
                self._dropped = 0
                return self._lines[0][0], text.encode()
            descriptor, line = self._lines.popleft()
            self._size -= len(line)
            return descriptor, line


def _write(descriptor: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # another program that has this terminal open wants it so
            select.select([], [descriptor], [])


class _Lines(io.RawIOBase):
    """The place of a file descriptor below a text stream."""

    def __init__(self, descriptor: int, queued: QueuedFile) -> None:
        self._descriptor = descriptor
        self._queued_stream = queued
        self._partial = b""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any, /) -> int:
        """Queue whole lines. Of a line that has no end yet, nothing is written: another stream could have the same
        file."""
        text = self._partial + bytes(data)
        end = text.rfind(b"\n") + 1
        self._partial = text[end:]
        if end:
            self._queued_stream.put(self._descriptor, text[:end])
        return len(data)

    def rest(self) -> None:
        """Write a line that has no end, too."""
        rest, self._partial = self._partial, b""
        if rest:
            self._queued_stream.put(self._descriptor, rest)


@contextlib.contextmanager
def queued_output(*, last_seconds: float = _LAST_SECONDS) -> Iterator[None]:
    """Let what this process prints in the block wait in a queue for whoever reads it; what is printed after the block
    comes after it. The end of the block waits at most `last_seconds` for what has not been read yet."""
    before = sys.stdout, sys.stderr
    files: dict[tuple[int, int], QueuedFile] = {}
    places: list[_Lines] = []
    now = [_queued_stream(stream, files, places) for stream in before]
    sys.stdout, sys.stderr = now
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for place in places:
            with contextlib.suppress(OSError):  # reported below
                place.rest()
        failures = [failure for queued in files.values() if (failure := queued.end(last_seconds)) is not None]
        if failures and not isinstance(failures[0], BrokenPipeError):
            with contextlib.suppress(OSError):
                print(f"warning: the last lines cannot be written: {failures[0].strerror}", file=sys.stderr, flush=True)


def _queued_stream(stream: TextIO, files: dict[tuple[int, int], QueuedFile], places: list[_Lines]) -> TextIO:
    """Return a stream over the file of this one; the streams of one file have one queue, which keeps their order."""
    try:
        stream.flush()
        descriptor = stream.fileno()
        status = os.fstat(descriptor)
    except (OSError, ValueError):  # no file of the system, or one that takes nothing
        return stream
    file = status.st_dev, status.st_ino
    if file not in files:
        files[file] = QueuedFile()
    place = _Lines(descriptor, files[file])
    places.append(place)
    # Without a buffer between them, as `python -u` has it.
    return io.TextIOWrapper(place, stream.encoding, stream.errors, write_through=True)  # type: ignore[type-var]


_UTF8_MODE = "PYTHONUTF8"


def ensure_utf8() -> None:
    """Starts this program anew in Python's UTF-8 mode where the locale means another encoding, which would be that of
    file names, arguments, pipes and files. What we start inherits the mode. (Can go when no Python has another one.)"""
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get(_UTF8_MODE) != "1":
        os.environ[_UTF8_MODE] = "1"
        # The same process, with its pipes.
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606
