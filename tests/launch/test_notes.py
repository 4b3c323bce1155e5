"""What status shows beside a process: the note of its last event, and of a dead one the reason of its death."""

from __future__ import annotations

from pathlib import Path

from pdserve.reach.protocol import Died, Late, Progress
from tests.launch.test_record import Kept


def test_what_a_dead_process_had_still_to_log_does_not_replace_the_reason_of_its_death(tmp_path: Path) -> None:
    fleet = Kept(tmp_path).fleet
    name = next(iter(fleet.state.processes))
    fleet.receive(Progress(name=name, text="loading weights: 50 %"))
    assert fleet.state.processes[name].note == "loading weights: 50 %"
    died = Died(name=name, pid=1, code=7, how="exited with code 7", seconds=1.0, while_starting=True, log_tail=())
    fleet.receive(died)
    fleet.receive(Progress(name=name, text="loading weights: 100 %"))
    assert fleet.state.processes[name].note == "exited with code 7"


def test_the_history_has_the_cause_of_a_death_whose_log_goes_on_with_the_next_life(tmp_path: Path) -> None:
    fleet = Kept(tmp_path).fleet
    engine = next(process.name for process in fleet.plan.processes if process.role == "decode")
    full = ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",)
    fleet.receive(
        Died(name=engine, pid=1, code=1, how="exited with code 1", seconds=1.0, while_starting=False, log_tail=full)
    )
    fleet.receive(
        Late(
            name=engine,
            seconds=9.0,
            last_answer="none",
            diagnostics=None,
            log_tail=("OSError: [Errno 24] Too many open files",),
        )
    )
    fleet.receive(Late(name=engine, seconds=9.0, last_answer="none", diagnostics=None, log_tail=("who knows",)))
    events, _ = fleet.run.read_events()
    of_death, of_start, unknown = (event for event in events if event["event"] in ("died", "late"))
    assert of_death["cause"] == "the device ran out of memory"
    assert "decode.args" in of_death["todo"]
    assert of_start["cause"] == "the limit of open files is reached"
    assert (unknown["cause"], unknown["todo"]) == (None, None)
    assert "log_tail" not in of_death
