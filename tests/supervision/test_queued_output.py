"""Output that nobody reads holds nobody up, and what waits for its reader is written in order."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import TextIO

import pytest

from pdserve.system import pipe_writer
from pdserve.system.pipe_writer import PipeWriter
from pdserve.system.queued_output import QueuedFile, queued_output

FULL_PIPE = b"x" * 4096


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """As small as a pipe can be. The test closes the end that it writes to."""
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, len(FULL_PIPE))
    with os.fdopen(read, "rb", buffering=0):
        yield read, write


@contextmanager
def standard(monkeypatch: pytest.MonkeyPatch, out: TextIO, err: TextIO | None = None) -> Iterator[None]:
    """Standard streams of the block."""
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", out)
        patched.setattr(sys, "stderr", err or out)
        yield


def read_all(descriptor: int) -> bytes:
    """Until its last writer has closed it."""
    with os.fdopen(descriptor, "rb", closefd=False) as stream:
        return stream.read()


def failure_of(line: str) -> OSError | None:
    """Of its print; the thread tries the lines before it by itself."""
    try:
        print(line)
    except OSError as failure:
        return failure
    return None


def test_lines_that_nobody_reads_hold_nobody_up_and_come_in_order_once_somebody_does(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = pipe
    os.write(write, FULL_PIPE)
    with os.fdopen(write, "w") as stream, standard(monkeypatch, stream):
        with queued_output(last_seconds=60):
            for number in range(100):
                print(f"out {number}")
                print(f"err {number}", file=sys.stderr)
            # It would stand here: nothing was read so far.
            assert os.read(read, len(FULL_PIPE)) == FULL_PIPE
        print("after the block")
    expected = [line for number in range(100) for line in (f"out {number}", f"err {number}")]
    assert read_all(read).decode().splitlines() == [*expected, "after the block"]


def test_what_is_never_read_is_waited_for_with_a_limit(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = pipe
    os.write(write, FULL_PIPE)
    with os.fdopen(write, "w") as stream:
        with standard(monkeypatch, stream), queued_output(last_seconds=0.01):
            print("a line")
        assert os.read(read, len(FULL_PIPE)) == FULL_PIPE
        for thread in threading.enumerate():
            if thread.name == "queued-output":
                thread.join()  # before its file is closed, which a program leaves to its end


def test_of_more_than_may_wait_the_oldest_lines_are_dropped_and_counted(pipe: tuple[int, int]) -> None:
    read, write = pipe
    os.write(write, FULL_PIPE)
    queued = QueuedFile(limit=30)
    queued.put(write, b"line 000....\n")
    while queued._size:
        pass  # until the thread stands at this line
    for number in range(1, 100):
        queued.put(write, b"line %03d....\n" % number)
    os.read(read, len(FULL_PIPE))
    assert queued.end(60) is None
    os.close(write)
    assert read_all(read).decode().splitlines() == [
        "line 000....",
        "(97 lines are missing here: this output was not read)",
        "line 098....",
        "line 099....",
    ]


def test_a_reader_that_leaves_is_told_once(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = pipe
    with Path(os.devnull).open("rb") as nobody:
        os.dup2(nobody.fileno(), read)  # closes the end of the pipe
    with os.fdopen(write, "w") as stream, standard(monkeypatch, stream), queued_output():
        told = next(failure for failure in map(failure_of, repeat("a line")) if failure is not None)
        assert isinstance(told, BrokenPipeError)
        assert failure_of("nobody is there") is None


def test_a_full_disk_below_the_very_last_line_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = tmp_path / "stderr"
    with (
        Path("/dev/full").open("w") as full,
        said.open("w") as err,
        standard(monkeypatch, full, err),
        queued_output(last_seconds=60),
    ):
        print("the last line")
    assert said.read_text() == "warning: the last lines cannot be written: No space left on device\n"


# A writer that never blocks its event loop, whatever the other side does


MORE_THAN_ANY_BUFFER = 8 * 1024 * 1024


async def test_what_the_other_side_does_not_read_yet_waits_and_arrives_in_order() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        writer = PipeWriter(ours.fileno())
        writer.write(b"a" * MORE_THAN_ANY_BUFFER)
        writer.write(b"z")
        reader, closing = await asyncio.open_connection(sock=theirs.dup())
        read = await reader.readexactly(MORE_THAN_ANY_BUFFER + 1)
        await writer.sent()
        closing.close()
        await closing.wait_closed()
    assert read == b"a" * MORE_THAN_ANY_BUFFER + b"z"


async def test_a_reader_that_pauses_gets_the_newest_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipe_writer, "BEHIND_SECONDS", 0.01)
    told = asyncio.Queue[bool]()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        newest = pipe_writer.NewestLines(ours.fileno(), told.put_nowait)
        for number in range(5_000):
            for worker in ("prefill-0", "decode-0"):
                newest.write(worker, f"{worker} {number:0100}\n".encode())
        assert await told.get()
        reader, closing = await asyncio.open_connection(sock=theirs.dup())
        lines = [await reader.readline()]
        while len([line for line in lines if line.endswith(b"4999\n")]) < 2:
            lines.append(await reader.readline())
        assert not await told.get()
        newest.close()
        closing.close()
        await closing.wait_closed()
    assert len(lines) < 10_000


async def test_a_socket_on_which_something_can_be_read_is_not_closed() -> None:
    """As behind sshd, where stdin and stdout are one socket."""

    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"an order that nobody has read yet")
        writer = PipeWriter(ours.fileno())
        await asyncio.sleep(0)
        writer.write(b"news")
        await writer.sent()
        outcome = theirs.recv(100)
    assert outcome == b"news"


async def test_a_peer_that_has_gone_is_no_error() -> None:
    read, write = os.pipe()
    writer = PipeWriter(write)
    os.close(read)
    writer.write(b"to nobody")
    writer.write(b"again")
    await writer.sent()
    os.close(write)
