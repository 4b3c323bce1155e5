"""The record of a deployment: written anew when it is deleted, and what it notes of a dead process."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import StateError
from pdserve.launch.fleet import Fleet
from pdserve.launch.launch_record import KeptRecord, record_run
from pdserve.reach.protocol import Died, Late, Progress
from pdserve.run.directory import RunDir, check_no_launcher, find
from tests.launch.records import own_identity, recorded_state
from tests.plan import kit

pytestmark = pytest.mark.process


class Kept:
    """A launcher's record and what the launcher said."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDir.create(folder, "fake", "run-1")
        plan, state = kit.plan(kit.recipe()), recorded_state(launcher=own_identity())
        record_run(self.run, plan, "name: fake", kit.VERSIONS)
        self.events: list[str] = []
        self.fleet = Fleet(plan, self.run, state, secrets={}, on_event=self._on_event, end=lambda: None)
        self.fleet.save()
        self.run.point_current()
        self.record = KeptRecord(self.fleet)
        self.files = {
            "plan": self.run.plan,
            "state": self.run.state,
            "recipe": self.run.recipe,
            "current": self.run.path.parent / "current",
        }

    def _on_event(self, event: dict[str, Any]) -> None:
        self.events.append(event["event"])

    def lacking(self) -> list[str]:
        """What is not there of all by which the deployment is found."""
        return [what for what, file in self.files.items() if not os.path.lexists(file)]


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path)


@pytest.mark.parametrize("what", ["state", "current"])
def test_one_file_that_is_gone_is_written_and_no_history_is_called_lost(kept: Kept, what: str) -> None:
    kept.files[what].unlink()
    kept.record.look()
    assert kept.lacking() == []
    assert kept.events == []
    assert find(kept.run.path.parent.parent, "fake").read_state().note == ""


def test_a_record_that_is_gone_is_written_and_reported_once(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(kept.run.path.parent)

    def vanished(run: RunDir) -> None:
        raise FileNotFoundError(run.path)

    with monkeypatch.context() as context:
        context.setattr(RunDir, "point_current", vanished)
        kept.record.look()
    assert kept.events == []
    kept.record.look()
    kept.record.look()
    assert kept.lacking() == []
    assert kept.events == ["record_deleted"]


@pytest.mark.parametrize("lost", ["lock", "folder", "replaced"])
def test_a_lock_that_is_removed_is_made_and_held_again(kept: Kept, lost: str) -> None:
    folder = kept.run.path.parent
    with kept.run.only_launcher():
        if lost == "folder":
            shutil.rmtree(folder)
        else:
            (folder / "lock").unlink()
        if lost == "replaced":
            (folder / "lock").touch()
        kept.record.look()
        with pytest.raises(StateError, match="another pdserve up"):
            check_no_launcher(folder.parent, "fake")
    check_no_launcher(folder.parent, "fake")


def test_current_leads_to_the_run_that_holds_the_lock(kept: Kept) -> None:
    """A launcher that could not serve beside this one has made its own run the current one."""
    other = RunDir.create(kept.run.path.parent.parent, "fake", "run-2")
    with kept.run.only_launcher():
        other.point_current()
        kept.record.look()
        assert find(kept.run.path.parent.parent, "fake").run_id == "run-1"


def test_a_key_that_went_with_its_folder_is_there_again_after_the_next_login(kept: Kept, pdserve_home: Path) -> None:
    folder = Path(os.environ["XDG_RUNTIME_DIR"])
    kept.run.save_key("secret")
    record = KeptRecord(kept.fleet, engine_key="secret")
    folder.rename(pdserve_home)
    folder.write_text("as good as no folder: nobody but root makes it")
    record.look()
    assert kept.events == []
    folder.unlink()
    folder.mkdir(mode=0o700)
    record.look()
    assert kept.run.read_key() == "secret"


def test_a_key_that_a_stop_takes_away_stays_away(kept: Kept, pdserve_home: Path) -> None:
    kept.fleet.state.phase = "draining"
    KeptRecord(kept.fleet, engine_key="secret").look()
    assert not kept.run.key_file.exists()


@pytest.mark.parametrize("torn", [b"\xff\xfe", bytes(24)])
def test_a_torn_note_of_the_keys_folder_is_written_anew(kept: Kept, pdserve_home: Path, torn: bytes) -> None:
    record = KeptRecord(kept.fleet, engine_key="secret")
    kept.run.key_folder.write_bytes(torn)
    record.look()
    assert kept.run.key_folder.read_text() == os.environ["XDG_RUNTIME_DIR"]
    assert kept.run.read_key() == "secret"


async def test_a_change_that_comes_before_a_waiter_runs_is_not_missed(kept: Kept) -> None:
    """Else a launcher that recovers calls a deployment degraded for as long as nothing else happens in it."""
    waiter = asyncio.ensure_future(kept.fleet.changed_since(kept.fleet.changes))
    kept.fleet.record("route", name="prefill-0", routing="ready")
    await asyncio.wait_for(waiter, 60)


def test_what_a_dead_process_had_still_to_log_does_not_replace_the_reason_of_its_death(kept: Kept) -> None:
    fleet, name = kept.fleet, next(iter(kept.fleet.state.processes))
    fleet.receive(Progress(name=name, text="loading weights: 50 %"))
    assert fleet.state.processes[name].note == "loading weights: 50 %"
    fleet.receive(died(name, while_starting=True))
    fleet.receive(Progress(name=name, text="loading weights: 100 %"))
    assert fleet.state.processes[name].note == "exited with code 7"


def died(name: str, log_tail: tuple[str, ...] = (), *, while_starting: bool = False) -> Died:
    how = "exited with code 7"
    return Died(name=name, pid=1, code=7, how=how, seconds=1.0, while_starting=while_starting, log_tail=log_tail)


def test_the_history_has_the_cause_of_a_death_whose_log_goes_on_with_the_next_life(kept: Kept) -> None:
    fleet = kept.fleet
    engine = next(process.name for process in fleet.plan.processes if process.role == "decode")
    fleet.receive(died(engine, ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",)))
    for line in ("OSError: [Errno 24] Too many open files", "who knows"):
        fleet.receive(Late(name=engine, seconds=9.0, last_answer="none", diagnostics=None, log_tail=(line,)))
    events, _ = fleet.run.read_events()
    of_death, of_start, unknown = (event for event in events if event["event"] in ("died", "late"))
    assert of_death["cause"] == "the device ran out of memory"
    assert "decode.args" in of_death["todo"]
    assert of_start["cause"] == "the limit of open files is reached"
    assert (unknown["cause"], unknown["todo"]) == (None, None)
    assert "log_tail" not in of_death
