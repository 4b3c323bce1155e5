"""Logs of any shape take a bounded time to read: the one who reads them has deaths to report."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.logs.causes import explain
from pdserve.logs.lines import LINE_CHARACTERS, GrowingLog, split
from pdserve.logs.progress import describe, is_fatal


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "engine.log"


def append(log: Path, data: bytes) -> None:
    with log.open("ab") as stream:
        stream.write(data)


def test_a_line_is_reported_once_and_only_when_it_is_complete(log: Path) -> None:
    growing = GrowingLog(log, 0)
    assert growing.step() == [], "there is no file yet"
    append(log, b"one\ntw")
    assert growing.step() == ["one"]
    append(log, b"o\r30 %\r60")
    assert growing.step() == ["two", "30 %"]
    append(log, b" %\n")
    assert growing.step() == ["60 %"]
    assert growing.step() == []


def test_lines_from_before_the_start_are_not_reported(log: Path) -> None:
    append(log, b"an earlier life\n")
    growing = GrowingLog(log, log.stat().st_size)
    append(log, b"this one\n")
    assert growing.step() == ["this one"]


def test_an_unfinished_line_is_not_read_again(log: Path) -> None:
    append(log, b"first")
    growing = GrowingLog(log, 0)
    assert growing.step() == []
    log.write_bytes(b"XXXXX and the rest\n")
    assert growing.step() == ["first and the rest"]


def test_a_line_without_end_is_read_in_steps_and_kept_in_part(log: Path) -> None:
    append(log, b"x" * 1024 * 1024)
    growing = GrowingLog(log, 0)
    for _ in range(4):
        assert growing.step() == []
        assert growing.behind
    assert growing.step() == []
    assert not growing.behind
    append(log, b"\nnext\n")
    assert growing.step() == ["x" * LINE_CHARACTERS, "next"]


def test_a_cut_inside_a_character_is_no_error() -> None:
    assert split("\U0001f600".encode() * 3000 + b"\nend") == ["\U0001f600" * LINE_CHARACTERS, "end"]
    assert split(b"\xff\xfe\n") == ["\ufffd\ufffd"]


def test_patterns_see_the_beginning_of_a_long_line_only() -> None:
    filler = "x" * LINE_CHARACTERS
    assert describe(f"Loading weights took 3 seconds {filler}") == "weights loaded in 3 s"
    assert describe(f"{filler} Loading weights took 3 seconds") is None
    assert not is_fatal(f"{filler} EngineCore failed to start")
    cause = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert explain([f"{cause} {filler}"], exit_code=None, role="prefill") is not None
    assert explain([f"{filler} {cause}"], exit_code=None, role="prefill") is None
