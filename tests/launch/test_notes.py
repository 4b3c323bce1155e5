"""What status shows beside a process: the note of its last event, and of a dead one the reason of its death."""

from __future__ import annotations

from pathlib import Path

from pdserve.reach.protocol import Died, Progress
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
