"""Numbers that several processes share: nothing is lost between them, and limits hold over all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.pd.config.proxy import ProxyConfig, WorkerConfig
from pdserve.pd.processes import shared_numbers
from pdserve.pd.processes.shared_numbers import Numbers
from pdserve.pd.workers.load import MAX_WORKERS, LoadBoard
from pdserve.pd.workers.registry import Registry

PROGRAM = """
import random, sys
from pathlib import Path
from pdserve.pd.processes import shared_numbers
from pdserve.pd.limits.admission import CELLS_PER_PROCESS, AdmissionGate
from pdserve.pd.config.settings import PoolLimits
class Worker:
    kv_usage = 0.0
numbers = shared_numbers.shared_numbers(Path(sys.argv[1]), 3 * CELLS_PER_PROCESS, process=int(sys.argv[2]), processes=3)
limits = PoolLimits(max_requests=4, max_prompt_tokens_in_flight=50)
gate = AdmissionGate("decode", limits, lambda: [Worker()], numbers, AssertionError)
inside, entered, refused = [], 0, 0
for _ in range(20_000):
    if inside and random.random() < 0.5:
        inside.pop().release()
        continue
    ticket = gate.try_admit(0, random.choice((10, 20, 50)))
    entered, refused = entered + (ticket is not None), refused + (ticket is None)
    inside += [ticket] if ticket else []
    with numbers.lock:
        assert gate.requests <= 4, gate.requests
        assert gate.tokens <= 50, gate.tokens
for ticket in inside:
    ticket.release()
assert entered and refused
"""


@pytest.mark.process
def test_a_gates_limits_hold_over_processes(tmp_path: Path) -> None:
    """An idle pool takes any prompt, so who leaves must give its tokens back before the request."""
    path = tmp_path / "numbers"
    path.touch()
    running = [subprocess.Popen([sys.executable, "-c", PROGRAM, str(path), str(index)]) for index in range(3)]
    assert [process.wait(60) for process in running] == [0, 0, 0]


# --- the load of each worker over all processes of the proxy, while workers come and go


PROCESSES = 2


def numbers(folder: Path, process: int) -> Numbers:
    path = folder / "numbers"
    path.touch()
    return shared_numbers.shared_numbers(path, LoadBoard.cells(PROCESSES), process=process, processes=PROCESSES)


def test_a_late_process_counts_on_the_same_rows(tmp_path: Path) -> None:
    ours = LoadBoard(numbers(tmp_path, 0))
    for name in ("decode-0", "decode-1", "decode-2"):
        ours.worker(name).add_request(1)
    ours.remove("decode-1")
    ours.worker("decode-3").add_request(5)
    successor = LoadBoard(numbers(tmp_path, 1))
    assert [successor.worker(name).requests for name in ("decode-3", "decode-0", "decode-2")] == [5, 1, 1]


def test_what_runs_to_a_removed_worker_is_nobodys_load(tmp_path: Path) -> None:
    board = LoadBoard(numbers(tmp_path, 0))
    for number in range(MAX_WORKERS):
        board.worker(f"decode-{number}")
    gone = board.worker("decode-7")
    gone.add_request(1)
    gone.add_prompt_tokens(100)
    board.remove("decode-7")
    new = board.worker("new")
    gone.add_request(-1)
    gone.add_prompt_tokens(-100)
    assert (new.requests, new.prompt_tokens) == (0, 0)


def test_a_row_is_reused_as_late_as_possible(tmp_path: Path) -> None:
    board = LoadBoard(numbers(tmp_path, 0))
    gone = board.worker("decode-0")
    gone.add_request(1)
    board.remove("decode-0")
    assert [board.worker(f"new-{number}").requests for number in range(MAX_WORKERS - 1)] == [0] * (MAX_WORKERS - 1)


def test_more_workers_at_once_are_refused_and_leave_no_trace(tmp_path: Path) -> None:
    board = LoadBoard(numbers(tmp_path, 0))
    for number in range(MAX_WORKERS):
        board.worker(f"decode-{number}")
    for _ in range(2):
        with pytest.raises(ValueError, match=f"more than {MAX_WORKERS} workers"):
            board.worker("one more")
    board.remove("decode-3")
    board.worker("one more").add_request(1)
    assert board.worker("one more").requests == 1


async def test_a_registry_takes_new_workers_for_ever(tmp_path: Path) -> None:
    config = ProxyConfig(port=0, served_name="tiny", protocol="nixl", workers=(), processes=PROCESSES)
    registry = Registry(config, LoadBoard(numbers(tmp_path, 0)))
    for number in range(MAX_WORKERS + 1):
        registry.add(WorkerConfig(name=f"decode-{number}", role="decode", url="http://127.0.0.1:1"))
        registry.remove(f"decode-{number}")


async def test_a_worker_that_cannot_be_made_takes_no_row(tmp_path: Path) -> None:
    """Only the process whose admin was asked knows of it."""
    config = ProxyConfig(port=0, served_name="tiny", protocol="nixl", workers=(), processes=PROCESSES)
    registry = Registry(config, LoadBoard(numbers(tmp_path, 0)))
    with pytest.raises(ValueError, match="label"):
        registry.add(WorkerConfig(name="bad", role="decode", url=f"http://{'ü' * 80}:1"))
    ours = registry.add(WorkerConfig(name="decode-0", role="decode", url="http://127.0.0.1:1"))
    ours.load.add_request(1)
    assert LoadBoard(numbers(tmp_path, 1)).worker("decode-0").requests == 1
