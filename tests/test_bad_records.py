"""Files of a run that are torn, not text, or another user's: one bad record is one bad record."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from pdserve.atomic_write import replace_text
from pdserve.errors import StateError
from pdserve.launch.failure import failure_markdown
from pdserve.logs.rotation import rotated_log
from pdserve.run import inbox
from pdserve.run.directory import RunDir
from tests.launch.records import no_room
from tests.plan import kit
from tests.tables import each_row


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    return RunDir.create(tmp_path / "home", "fake", "run-1")


# --- the history


@each_row(
    "bad",
    [b'{"at": 1, "eve', b"\xff\xfe\x00", b"[]", b"{}", b'{"at": "x", "event": "y"}', b"[" * 50_000, b"9" * 5000]
    + [b'{"at": %s, "event": "y"}' % at for at in (b"NaN", b"1e999", b"-1", b"9" * 400)],
)
@each_row("end", [b"", b"\n"])
def test_a_line_that_cannot_be_read_hides_no_other(tmp_path: Path, bad: bytes, end: bytes) -> None:
    run = RunDir.create(tmp_path, "fake", "run-1")
    run.append_event("one")
    with run.events.open("ab") as file:
        file.write(bad + end)
    run.append_event("two")
    events, offset = run.read_events()
    assert [event["event"] for event in events] == ["one", "unreadable", "two"]
    assert events[1]["at"] == events[0]["at"]
    assert offset == run.events.stat().st_size
    assert "unreadable" in failure_markdown(StateError("it failed"), "fake", None, events)


def test_what_there_is_no_room_for_leaves_nothing_of_itself(run: RunDir) -> None:
    run.append_event("one")
    size = run.events.stat().st_size
    with no_room(size + 10), pytest.raises(OSError, match=r"File too large|could not be written whole"):
        run.append_event("two", text="x" * 100)
    assert run.events.stat().st_size == size
    run.append_event("three")
    assert [event["event"] for event in run.read_events()[0]] == ["one", "three"]


def filled(run: RunDir, first: int = 0) -> int:
    """Fills the history until it is cut; the number of the next event."""
    before = rotated_log(run.events).stat().st_ino if rotated_log(run.events).exists() else None
    number = first
    while not rotated_log(run.events).exists() or rotated_log(run.events).stat().st_ino == before:
        run.append_event("noise", number=number, text="x" * 60_000)
        number += 1
        assert number < first + 10_000, "a history without an end"
    return number


def numbers(events: list[dict[str, Any]]) -> list[int]:
    return [event["number"] for event in events if event["event"] == "noise"]


def test_a_history_is_cut_when_it_is_full_and_its_last_part_is_kept(run: RunDir) -> None:
    first = filled(run)
    last = filled(run, first)
    assert numbers(run.read_events()[0]) == list(range(first - 1, last))
    assert sum(file.stat().st_size for file in run.path.glob("events.jsonl*")) < 9 << 20


def test_who_follows_a_history_misses_nothing_however_late_he_comes(run: RunDir) -> None:
    run.append_event("one")
    _, offset = run.read_events()
    last = filled(run)
    events, offset = run.read_events(offset)
    assert numbers(events) == list(range(last))
    last = filled(run, last)
    events, offset = run.read_events(offset)
    assert numbers(events)[-1] == last - 1
    assert run.read_events(offset) == ([], offset)
    run.append_event("last")
    assert [event["event"] for event in run.read_events(offset)[0]] == ["last"]


# --- requests


def test_a_request_is_not_lost_with_another(run: RunDir) -> None:
    """The second one stands nowhere any more when the first is no text and the last cannot be answered."""
    for name in ("1", "3"):
        (run.inbox / f"{name}.json").write_bytes(b"\xff\xfe{}")
    (run.inbox / "3.reply").mkdir()
    (run.inbox / "2.json").write_text(json.dumps({"verb": "down"}))
    (run.inbox / "4.json").mkdir()
    assert inbox.take(run) == [("2", inbox.Down())]
    assert json.loads((run.inbox / "1.reply").read_text())["exit_code"] == 8


def test_a_request_without_disk_space_is_an_error(run: RunDir) -> None:
    with no_room(0), pytest.raises(inbox.NotAskedError, match="cannot be written") as refused:
        inbox.ask(run, inbox.Down(), seconds=1, alive=lambda: True)
    assert "File too large" in str(refused.value.cause)


# --- the state and the plan


@pytest.mark.parametrize("name", ["state", "plan"])
@pytest.mark.parametrize(("there", "cause"), [("folder", "Is a directory"), ("link", "it is a symbolic link")])
def test_a_record_that_is_no_file_is_an_error_with_its_fix(run: RunDir, name: str, there: str, cause: str) -> None:
    file, read = (run.state, run.read_state) if name == "state" else (run.plan, run.read_plan)
    if there == "folder":
        file.mkdir()
    else:
        (run.path / "other").write_text("{}")
        file.symlink_to("other")
    with pytest.raises(StateError, match=f"the {name}.json of this run cannot be read") as refused:
        read()
    assert refused.value.where == str(file)
    assert str(refused.value.cause).startswith(cause)
    assert f"take {name}.json away" in str(refused.value.todo)


@pytest.mark.parametrize("lacking", ["prefill-0", "decode-0", "lmcache-0", "proxy"])
def test_a_plan_that_lacks_what_it_names_is_an_error_with_its_fix(run: RunDir, lacking: str) -> None:
    plan = kit.plan(kit.recipe(kit.with_lmcache()))
    run.write(run.plan, plan.model_dump_json())
    assert run.read_plan() == plan
    kept = tuple(process for process in plan.processes if process.name != lacking)
    run.write(run.plan, plan.model_copy(update={"processes": kept}).model_dump_json())
    with pytest.raises(StateError, match=r"this plan\.json is not whole") as refused:
        run.read_plan()
    assert lacking in str(refused.value.cause)
    assert "take plan.json away" in str(refused.value.todo)


# --- the key


def test_a_key_that_others_can_read_or_have_put_there_is_not_used(run: RunDir, tmp_path: Path) -> None:
    run.save_key("secret")
    assert run.read_key() == "secret"
    run.key_file.chmod(0o644)
    with pytest.raises(StateError, match="not ours alone") as refused:
        run.read_key()
    assert "mode 0644" in str(refused.value.cause)
    run.key_file.unlink()
    other = tmp_path / "other"
    other.write_text("theirs")
    run.key_file.symlink_to(other)
    with pytest.raises(StateError, match="cannot be read"):
        run.read_key()


def test_a_key_that_a_logout_removed_is_reported_with_its_path(run: RunDir) -> None:
    run.save_key("secret")
    shutil.rmtree(run.key_file.parent)
    with pytest.raises(StateError, match="key is gone") as refused:
        run.read_key()
    assert refused.value.where == str(run.key_file)
    assert "logout" in str(refused.value.cause)
    assert "enable-linger" in str(refused.value.todo)


def test_a_key_is_found_from_another_session(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run.save_key("secret")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "of another login"))
    assert RunDir(run.path).read_key() == "secret"
    RunDir(run.path).forget_key()
    assert not list(tmp_path.rglob("*.key"))


@pytest.mark.parametrize("there", ["a link", "open to others"])
def test_a_shared_folder_for_keys(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str) -> None:
    folder = tmp_path / "elsewhere"
    if there == "a link":
        (tmp_path / "target").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "target")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    with pytest.raises(StateError) as refused:
        run.save_key("secret")
    assert refused.value.cause is not None
    assert "XDG_RUNTIME_DIR" in str(refused.value.todo)
    assert not [file for file in tmp_path.rglob("*.key") if os.path.lexists(file)]


def test_a_file_that_cannot_be_replaced_stays_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    (tmp_path / "record" / "old").mkdir(parents=True)
    with pytest.raises(OSError, match="record"):
        replace_text(tmp_path / "record", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["record"]
