"""A real process that writes without end: its log stays small, and nobody who reads it is led astray."""

from __future__ import annotations

import asyncio
import errno
import io
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.logs import rotation
from pdserve.logs.lines import GrowingLog, end_of
from pdserve.logs.rotation import rotated_log
from pdserve.node import supervised
from pdserve.plan.process import Process
from pdserve.reach.protocol import Died, LogCut, Started
from pdserve.recipe.sections import Logs
from pdserve.run.directory import RunDir
from pdserve.system.process import send
from tests.launch.deployment import PDSERVE, REPOSITORY
from tests.supervision.agents import planned, until
from tests.supervision.test_supervised import watched

WRITER = """
import itertools, sys, time
for number in itertools.count():
    print(f"{number:07d} " + 1000 * "x", flush=True)
    if number % 64 == 0:
        time.sleep(0.01)
"""


def numbers(data: bytes) -> list[int]:
    return [int(line[:7]) for line in data.splitlines() if len(line) == 1008]


def writer(**logs: int) -> Process:
    return planned("decode-0", WRITER).model_copy(update={"probe": None, "logs": Logs(**logs)})


def all_of(growing: GrowingLog) -> list[str]:
    """Return the lines that it has not told yet."""
    lines = growing.step()
    while growing.behind:
        lines += growing.step()
    return lines


@pytest.mark.process
async def test_a_log_is_cut_while_its_writer_writes_and_the_oldest_are_dropped(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "decode-0@here.log"

    async with watched(writer(max_mib=1, keep=2), tmp_path) as under_test:
        started = await under_test.expect(Started)
        await until(rotated_log(log, 2).exists)
        inode = log.stat().st_ino
        latest = rotated_log(log).stat().st_ino
        await until(lambda: rotated_log(log).stat().st_ino != latest)  # once more, so that one is dropped
        assert log.stat().st_ino == inode, "the file that the child has open"
        assert send(started.id, signal.SIGKILL)
        died = await under_test.expect(Died)
        # What it has written last may be cut once more. Whoever stopped in the middle of that would find a half.
        await until(lambda: log.stat().st_size <= 1 << 20 and not rotated_log(log, 0).exists())
    assert not rotated_log(log, 3).exists()
    assert not rotated_log(log, 0).exists()
    files = [file.read_bytes() for file in (rotated_log(log, 2), rotated_log(log), log)]
    seen = [number for data in files for number in numbers(data)]
    assert seen == sorted(set(seen)), "nothing twice, nothing out of order"
    # A KILL can end a write between two pages, so the last line may be torn: numbers() does not count such a line.
    assert died.log_tail[-1].encode() == b"".join(files).splitlines()[-1]
    assert len(died.log_tail) > 60, "also when the log was cut a moment ago"


class FullDisk(io.StringIO):
    """A stderr that takes nothing, and has whether it was tried."""

    tried = False

    def write(self, text: str) -> int:
        self.tried = True
        raise OSError(errno.ENOSPC, "No space left on device")


async def cut_once_it_can_be(log: Path, stderr: FullDisk) -> None:
    """Returns when it was. At first a folder stands where its copy begins."""
    await until(lambda: stderr.tried)
    rotated_log(log, 0).rmdir()
    await until(rotated_log(log).exists)


@pytest.mark.process
async def test_a_log_that_cannot_be_cut_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's own log is on the same full disk."""
    monkeypatch.setattr(sys, "stderr", stderr := FullDisk())
    monkeypatch.setattr(supervised, "_CUT_AGAIN_SECONDS", 0.01)
    log = tmp_path / "logs" / "decode-0@here.log"
    rotated_log(log, 0).mkdir(parents=True)

    async with watched(writer(max_mib=1, keep=1), tmp_path):
        await cut_once_it_can_be(log, stderr)


async def test_so_is_one_of_our_own_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stderr := FullDisk())
    monkeypatch.setattr(rotation, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(rotation, "_AGAIN_SECONDS", 0.01)
    log = tmp_path / "launcher.log"
    log.write_text("line\n" * (300 << 10))
    rotated_log(log, 0).mkdir()

    keeping = asyncio.create_task(rotation.keep_bounded(tmp_path, lambda: Logs(max_mib=1, keep=1)))
    await cut_once_it_can_be(log, stderr)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


def cut(log: Path, keep: int = 1) -> None:
    rotation.begin(log, keep)
    rotation.finish(log, keep)


def test_a_follower_goes_on_where_the_log_was_cut(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("one\ntw")
    growing = GrowingLog(log, 0)
    assert growing.step() == ["one"]
    with log.open("a") as stream:
        stream.write("o\nthree\nfo")
        stream.flush()
        cut(log)
        stream.write("ur\n")
    assert all_of(growing) == ["two", "three", "four"]


def test_what_came_during_the_copy_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("before\n")
    rotation.begin(log, 2)
    with log.open("a") as stream:
        stream.write("meanwhile\n")
    rotation.finish(log, 2)
    assert (rotated_log(log).read_text(), log.read_text()) == ("before\nmeanwhile\n", "")


def test_logs_of_our_own_processes_are_cut_and_those_that_an_agent_cuts_are_left_to_it(tmp_path: Path) -> None:
    large = "line\n" * (300 << 10)
    ours, theirs = ("launcher.log", "agent@n.log", "probe@n.log"), "decode-0@n.log"
    for name in (*ours, theirs):
        (tmp_path / name).write_text(large)
    (tmp_path / "agent@small.log").write_text("line\n")
    asyncio.run(rotation.cut_large(tmp_path, Logs(max_mib=1, keep=1)))
    for name in ours:
        assert ((tmp_path / name).read_text(), rotated_log(tmp_path / name).read_text()) == ("", large)
    assert (tmp_path / theirs).read_text() == large
    assert (tmp_path / "agent@small.log").read_text() == "line\n"
    (tmp_path / "launcher.log").write_text(large)
    asyncio.run(rotation.cut_large(tmp_path, Logs(max_mib=0)))
    assert (tmp_path / "launcher.log").read_text() == large, "0: never"
    rotated_log(tmp_path / "launcher.log").unlink()
    asyncio.run(rotation.cut_large(tmp_path, Logs(max_mib=1, keep=0)))
    assert (tmp_path / "launcher.log").read_text() == ""
    assert not rotated_log(tmp_path / "launcher.log").exists(), "no copy is kept"


def test_the_end_of_a_log_that_was_just_cut_is_found_on_both_sides(tmp_path: Path) -> None:
    log = tmp_path / "agent@n.log"
    log.write_text("one\ntwo\n")
    cut(log)
    with log.open("a") as stream:
        stream.write("three\n")
    assert end_of(log, 10) == b"two\nthree\n"
    assert end_of(log, 1000) == b"one\ntwo\nthree\n"
    assert end_of(tmp_path / "none", 10) == b""


def no_copy(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.process
async def test_on_a_full_disk_a_log_is_emptied_and_that_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotation, "_copy", no_copy)
    log = tmp_path / "logs" / "decode-0@here.log"
    log.parent.mkdir()
    log.write_text("x" * (1 << 20) + "\n")
    rotated_log(log).write_text("of a cut before\n")
    growing = GrowingLog(log, log.stat().st_size)
    process = writer(max_mib=1, keep=1).model_copy(update={"argv": ("/bin/sh", "-c", "exec sleep 600")})
    async with watched(process, tmp_path) as under_test:
        cut = await under_test.expect(LogCut)
    assert (cut.lost > 1 << 20, cut.why) == (True, "No space left on device")
    assert not rotated_log(log).exists()
    log.write_text("after\n")
    assert all_of(growing) == ["after"], "a follower goes on"


@pytest.mark.process
def test_logs_are_followed_over_a_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_HOME", str(tmp_path))
    run = RunDir.create(tmp_path, "fake", "r1")
    run.point_current()
    log = run.logs / "proxy@here.log"
    log.write_text("first\n")
    cut(log)
    log.write_text("second\n")
    argv = [*PDSERVE, "logs", "proxy", "--deployment", "fake", "-f"]
    with subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        assert [following.stdout.readline() for _ in range(2)] == ["first\n", "second\n"], "also what was cut off"
        with log.open("a") as stream:
            stream.write("third\n")
            stream.flush()
            cut(log)
            stream.write("4\n")
        assert [following.stdout.readline() for _ in range(2)] == ["third\n", "4\n"]
        following.send_signal(signal.SIGINT)
