"""Logs of any shape take a bounded time to read: the one who reads them has deaths to report."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.logs.causes import explain
from pdserve.logs.lines import LINE_CHARACTERS, GrowingLog, last_lines, split, without_echoes
from pdserve.logs.progress import describe, is_fatal
from tests.tables import each_row


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


# A dead engine's API server repeats one error for each of its requests; the cause stands before all of them


RECORDED = Path(__file__).parent / "fixtures" / "logs" / "vllm-step-timeout.txt"
LINES, BYTES = 400, 64 << 10
FINE = "(APIServer pid=26090) INFO 11-22 14:50:00 [loggers.py:310] Engine 000: Avg prompt throughput: 0.8 tokens/s"
REFUSED = 'INFO:     10.0.0.7:41234 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error'
DEAD = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."


def parts() -> tuple[list[str], list[str], list[str]]:
    """The recorded death: what stands before the traceback of its request, that, and the rest."""
    lines = RECORDED.read_text().splitlines()
    of_request = [number for number, line in enumerate(lines) if "[vllm_error.py:54]" in line]
    return lines[: of_request[0]], lines[of_request[0] : of_request[-1] + 1], lines[of_request[-1] + 1 :]


def streamed(request: list[str]) -> list[str]:
    """The same in a generator of a streamed answer (openai/chat_completion/serving.py): fewer frames."""
    head = request[0].partition("[vllm_error.py:54] ")[0] + "[serving.py:929] "
    frames = [line.partition("[vllm_error.py:54] ")[2] for line in request[-9:]]
    return [
        head + text for text in ("Error in chat completion stream generator.", "Traceback (most recent call last):")
    ] + [head + text for text in frames]


def death(requests: int, *, of_stream: bool = False) -> list[str]:
    """Of an engine that had so many requests, after hours of service."""
    before, request, after = parts()
    request = streamed(request) if of_stream else [*request, REFUSED]
    return [FINE] * 1000 + before + request * requests + after


def tail(lines: list[str]) -> tuple[str, ...]:
    """As an agent has it in the report of a death."""
    log = "\n".join(lines).encode()
    return last_lines(lambda most: log[-most:], LINES, BYTES)


@each_row("requests, of_stream", [(1, False), (9, True), (16, False), (700, False), (700, True)])
def test_the_cause_is_found_however_many_requests_ran(requests: int, of_stream: bool) -> None:
    hint = explain(tail(death(requests, of_stream=of_stream)), exit_code=1, role="decode")
    assert hint is not None
    assert "has not answered execute_model" in hint.cause


def test_lines_of_two_servers_that_stand_among_each_other_are_told_apart() -> None:
    before, request, _ = parts()
    other = [line.replace("APIServer pid=26090", "ApiServer_1 pid=26091") for line in request]
    mixed = [line for pair in zip(request, other, strict=True) for line in pair]
    left = without_echoes(before + mixed * 20)
    assert len(left) <= len(before) + 2


def test_an_error_of_a_request_that_is_another_stays() -> None:
    place = "(APIServer pid=1) ERROR 11-22 14:54:41 [serving.py:929] "
    dead = [
        place + "Error in chat completion stream generator.",
        place + "Traceback (most recent call last):",
        place + DEAD,
    ]
    other = [
        "(APIServer pid=1) ERROR 11-22 14:54:42 [serving.py:929] ValueError: of another request",
        "(APIServer pid=1) ERROR 11-22 14:54:42 [launcher.py:10] Traceback (most recent call last):",
        "(APIServer pid=1) ERROR 11-22 14:54:42 [launcher.py:10] OSError: [Errno 24] Too many open files",
        "(EngineCore pid=2) ERROR 11-22 14:54:42 [core.py:1] " + DEAD,
    ]
    assert without_echoes([*dead, *other, *dead]) == [dead[-1], *other]


def test_without_a_dead_engine_nothing_is_left_out() -> None:
    lines = [FINE, REFUSED, *parts()[0]] * 3
    alive = [line for line in lines if "EngineDeadError" not in line]
    assert without_echoes(alive) == alive
    assert tail(alive) == tuple(alive[-LINES:])


def test_a_tail_has_its_limits() -> None:
    assert tail([f"{number:05d} " + 800 * "x" for number in range(1000)])[-1].startswith("00999")
    assert sum(len(line) + 1 for line in tail(["x" * 800] * 1000)) <= BYTES
