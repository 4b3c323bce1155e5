"""A dead engine's API server repeats one error for each of its requests; the cause stands before all of them."""

from __future__ import annotations

from pathlib import Path

from pdserve.logs.causes import explain
from pdserve.logs.lines import last_lines, without_echoes
from tests.tables import each_row

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


def death(requests: int, *, of_stream: bool = False, servers: int = 1) -> list[str]:
    """Of an engine that had so many requests, after hours of service."""
    before, request, after = parts()
    request = streamed(request) if of_stream else [*request, REFUSED]
    several = [
        [line.replace("APIServer pid=26090", f"ApiServer_{n} pid={n}") for line in request] for n in range(servers)
    ]
    each = [line for number in range(requests) for line in (request if servers == 1 else several[number % servers])]
    return [FINE] * 1000 + before + each + after


def tail(lines: list[str]) -> tuple[str, ...]:
    """As an agent has it in the report of a death."""
    log = "\n".join(lines).encode()
    return last_lines(lambda most: log[-most:], LINES, BYTES)


@each_row("requests, of_stream, servers", [
    (1, False, 1), (9, True, 1), (16, False, 1), (700, False, 1), (700, True, 1), (320, False, 32),
])  # fmt: skip
def test_the_cause_is_found_however_many_requests_ran(requests: int, of_stream: bool, servers: int) -> None:
    hint = explain(tail(death(requests, of_stream=of_stream, servers=servers)), exit_code=1, role="decode")
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
