"""Why it failed: the history of a run, whole or torn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pdserve.run.directory import RunDir
from pdserve.run.state import Phase
from tests.doctor.kit import diagnosed, died, only, rules, run_dir
from tests.tables import each_row

EVENTS: list[tuple[dict[str, Any], str, str]] = [
    (
        {
            "event": "late",
            "name": "proxy",
            "seconds": 32.1,
            "last_answer": "GET /health: ReadTimeout",
            "diagnostics": "d",
        },
        "start-late",
        "GET /health: ReadTimeout",
    ),
    ({"event": "unresponsive", "name": "decode-0", "why": "PID 7 is stopped"}, "process-silent", "PID 7 is stopped"),
    ({"event": "out_of_sockets", "name": "decode-0", "times": 3, "todo": "raise it"}, "out-of-sockets", "3 times"),
    (
        {"event": "swapped", "name": "decode-0", "node": "n1", "bytes": 3 << 30, "read_back": 1 << 30},
        "swapping",
        "3.0 GiB of its memory were swapped out to a disk, and its node has read 1.0 GiB back",
    ),
    ({"event": "cache_down", "name": "lmcache-0", "engines": ["prefill-0"]}, "cache-server-down", "prefill-0"),
    ({"event": "agent_gone", "node": "n1", "how": "its pipe closed"}, "node-lost", "n1"),
    ({"event": "signal_received", "node": "n1", "signal": "SIGTERM"}, "ended-from-outside", "SIGTERM"),
    ({"event": "log_cut", "name": "decode-0", "lost": 5 << 20, "why": "No space left"}, "log-lost", "5 MiB"),
]


@each_row("event, rule, words", EVENTS)
def test_an_event_is_a_cause_with_its_time(tmp_path: Path, event: dict[str, Any], rule: str, words: str) -> None:
    diagnosis = only(run_dir(tmp_path, events=[event]))
    assert diagnosis.rule == rule
    assert words in diagnosis.cause
    assert diagnosis.evidence[0].source == "events.jsonl"
    assert diagnosis.evidence[0].at


@each_row("name, key", [("proxy", "proxy_seconds"), ("lmcache-0", "lmcache_seconds"), ("decode-1", "engine_seconds")])
def test_a_late_process_gets_the_limit_of_its_own_stage(tmp_path: Path, name: str, key: str) -> None:
    late = {"event": "late", "name": name, "seconds": 30.0, "last_answer": "none", "diagnostics": "d"}
    assert only(run_dir(tmp_path, events=[late])).setting == f"timeouts.{key}=60"


NEXT_LIFE = [
    {"event": "restarting", "name": "decode-0", "attempt": 1, "after_seconds": 1},
    {"event": "started", "name": "decode-0", "node": "n1", "pid": 2},
    {"event": "ready", "name": "decode-0", "seconds": 3.0},
]
OF_THE_NEXT_LIFE = "FileNotFoundError: [Errno 2] No such file or directory: '/data/of-a-client.png'"


@each_row("cause, todo, said", [
    ("the device ran out of memory", "lower it", ": the device ran out"), (None, None, "names no known cause"),
])  # fmt: skip
def test_a_death_is_not_explained_by_the_next_life(
    tmp_path: Path, cause: str | None, todo: str | None, said: str
) -> None:
    """Its log goes on, and what stands at its end then is of another life."""
    death = died("decode-0", 1, cause=cause, todo=todo)
    diagnosis = only(run_dir(tmp_path, events=[death, *NEXT_LIFE], logs={"decode-0": [OF_THE_NEXT_LIFE]}))
    assert said in diagnosis.cause
    assert todo in (None, diagnosis.todo)
    assert [each.source for each in diagnosis.evidence] == ["events.jsonl"]


def test_a_death_is_named_once_for_each_process_however_often(tmp_path: Path) -> None:
    events = [died("decode-0", 1), died("decode-0", -9), died("decode-1", -9)]
    [diagnosis] = diagnosed(run_dir(tmp_path, events=events))
    assert diagnosis.processes == ("decode-0", "decode-1")
    assert "SIGKILL" in diagnosis.cause


@each_row("recorded, lost", [("ready", True), ("starting", True), ("stopped", False), ("failed", False)])
def test_a_launcher_that_recorded_no_end_is_lost(tmp_path: Path, recorded: Phase, lost: bool) -> None:
    assert rules(run_dir(tmp_path, phase=recorded)) == ({"launcher-lost"} if lost else set())


def test_a_run_that_started_nothing_has_the_cause_of_its_failure(tmp_path: Path) -> None:
    folder = tmp_path / "home" / "test" / "preflight-20261124-105058-230a13"
    folder.mkdir(parents=True)
    (folder / "failure.md").write_text(
        "# test failed\n\n**model.path does not exist**\n\n- where: model.path\n- likely cause: a typing error\n"
        "- what to do: correct model.path\n"
    )
    diagnosis = only(RunDir(folder))
    assert (diagnosis.rule, diagnosis.cause) == ("start-failed", "model.path does not exist: a typing error")
    assert diagnosis.todo == "correct model.path"


FAILED = "# test failed\n\n**node a is lost while serving**\n\n- what to do: read its log\n"


def test_the_error_that_ended_a_run_which_had_served_is_no_failed_start(tmp_path: Path) -> None:
    run = run_dir(tmp_path, events=[{"event": "up", "total_seconds": 9.0}], phase="failed")
    (run.path / "failure.md").write_text(FAILED)
    assert (only(run).rule, only(run).todo) == ("ended-with-error", "read its log")


# --- records that are torn, not text, or another user's


@each_row("bad", [b'{"at": 1, "eve', b"\xff\xfe\x00", b"[]", b'{"at": "x", "event": "died"}'])
def test_a_torn_line_hides_no_cause(tmp_path: Path, bad: bytes) -> None:
    run = run_dir(tmp_path, events=[died("decode-0", -9)])
    with run.events.open("ab") as file:
        file.write(bad + b"\n")
    run.append_event("died", **{key: value for key, value in died("lmcache-0", 3).items() if key != "event"})
    assert rules(run) == {"process-died", "record-unreadable"}


@each_row(
    "fields",
    [{}, {"name": None}, {"name": ["a"], "seconds": "x", "lost": [], "engines": 3, "times": None, "at": 1e300}],
)
@each_row("kind", ["died", "late", "restarting", "unresponsive", "cache_down", "log_cut", "agent_gone"])
def test_fields_of_the_wrong_kind_break_nothing(tmp_path: Path, kind: str, fields: dict[str, Any]) -> None:
    run = run_dir(tmp_path)
    run.events.write_text(f"{json.dumps({'at': 1.0, 'event': kind, **fields})}\n" * 2)
    assert diagnosed(run)


@each_row("name", ["state.json", "plan.json"])
@each_row("content", ["", "{", "[]", '{"name": 3}', "\udcff\x00"])
def test_a_record_that_cannot_be_read_is_named_and_hides_no_other(tmp_path: Path, name: str, content: str) -> None:
    run = run_dir(tmp_path, events=[died("decode-0", -9)])
    (run.path / name).write_text(content, errors="surrogateescape")
    assert rules(run) == {"process-died", "record-unreadable"}
    [unread] = [each for each in diagnosed(run) if each.rule == "record-unreadable"]
    assert name in unread.evidence[0].text


def test_a_record_that_others_can_write_is_not_believed(tmp_path: Path) -> None:
    run = run_dir(tmp_path)
    run.path.chmod(0o755)
    run.state.chmod(0o666)
    assert "can be written by others" in only(run).evidence[0].text
