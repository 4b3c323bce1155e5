"""Numbers that several processes share: nothing is lost between them, and limits hold over all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.pd.processes import shared_numbers

pytestmark = pytest.mark.process

COUNT = """
import sys
from pathlib import Path
from pdserve.pd.processes import shared_numbers
numbers = shared_numbers.shared(Path(sys.argv[1]), 4, process=int(sys.argv[2]), processes=3)
cells = numbers.take(4)
for _ in range(50_000):
    with numbers.lock:
        cells[0] += 1
"""
ENTER = """
import random, sys
from pathlib import Path
from pdserve.pd.processes import shared_numbers
from pdserve.pd.limits.admission import CELLS_PER_PROCESS, AdmissionGate
from pdserve.pd.config.settings import PoolLimits
class Worker:
    kv_usage = 0.0
numbers = shared_numbers.shared(Path(sys.argv[1]), 3 * CELLS_PER_PROCESS, process=int(sys.argv[2]), processes=3)
limits = PoolLimits(max_requests=4, max_prompt_tokens_in_flight=50)
gate = AdmissionGate("decode", limits, lambda: [Worker()], numbers, AssertionError)
inside, entered, refused = [], 0, 0
for _ in range(5000):
    if inside and random.random() < 0.5:
        inside.pop().release()
        continue
    ticket = gate.try_admit(0, random.randrange(1, 30))
    entered, refused = entered + (ticket is not None), refused + (ticket is None)
    inside += [ticket] if ticket else []
    with numbers.lock:
        assert gate.requests <= 4, gate.requests
        assert gate.tokens <= 50, gate.tokens
for ticket in inside:
    ticket.release()
assert entered
print(refused)
"""
LEAVE = """
import sys
from pathlib import Path
from pdserve.pd.processes import shared_numbers
from pdserve.pd.limits.admission import CELLS_PER_PROCESS, AdmissionGate
from pdserve.pd.config.settings import PoolLimits
class Worker:
    kv_usage = 0.0
numbers = shared_numbers.shared(Path(sys.argv[1]), 3 * CELLS_PER_PROCESS, process=int(sys.argv[2]), processes=3)
limits = PoolLimits(max_prompt_tokens_in_flight=50)
gate = AdmissionGate("decode", limits, lambda: [Worker()], numbers, AssertionError)
entered = 0
for _ in range(60_000):
    if ticket := gate.try_admit(0, 50):
        entered += 1
        with numbers.lock:
            assert gate.tokens <= 50, gate.tokens
        ticket.release()
assert entered
"""


def together(code: str, path: Path) -> list[str]:
    """What three processes print that run the code at the same time."""
    argv = [[sys.executable, "-c", code, str(path), str(index)] for index in range(3)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in argv]
    outputs = [process.communicate(timeout=60)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    return outputs


def test_under_the_lock_no_change_of_another_process_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.touch()
    together(COUNT, path)
    assert shared_numbers.shared(path, 4, process=0, processes=3).take(1)[0] == 150_000


def test_a_gates_limits_hold_over_processes_that_enter_at_the_same_time(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.touch()
    refused = together(ENTER, path)
    assert any(int(count) for count in refused), "the limit was never reached"


def test_a_pool_is_not_taken_for_idle_while_tokens_of_one_that_leaves_still_count(tmp_path: Path) -> None:
    """An idle pool takes any prompt, so who leaves must give its tokens back first."""
    path = tmp_path / "numbers"
    path.touch()
    together(LEAVE, path)


def test_numbers_are_taken_in_order_and_not_twice() -> None:
    numbers = shared_numbers.private(5)
    first, second = numbers.take(2), numbers.take(3)
    first[1], second[0] = 7, 8
    assert list(numbers.cells) == [0, 7, 8, 0, 0]
    with pytest.raises(ValueError, match="6 shared numbers are wanted, there are 5"):
        numbers.take(1)
