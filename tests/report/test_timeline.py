"""Timelines: what the history of a run has becomes lanes, marks and incidents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pdserve.report.page import report_page, timeline_picture
from pdserve.report.rows import Lane, MeasuredSpan, Timeline, read_report, timeline

HEALTHY: tuple[tuple[float, str, dict[str, Any]], ...] = (
    (0, "start", {"name": "decode-0", "node": "n"}),
    (1, "started", {"name": "decode-0", "node": "n", "pid": 7}),
    (5, "ready", {"name": "decode-0", "seconds": 4.0}),
    (6, "phase", {"phase": "ready"}),
)


def drawn(*events: tuple[float, str, dict[str, Any]], measured: tuple[MeasuredSpan, ...] = ()) -> Timeline:
    some = [{"at": 1000.0 + at, "event": kind, **more} for at, kind, more in events]
    made = timeline("run-1", "x", some, measured)
    assert made is not None
    return made


def lane(of: Timeline, name: str = "decode-0") -> Lane:
    return next(each for each in of.lanes if each.name == name)


def spans(of: Timeline, name: str = "decode-0") -> list[tuple[str, float, float]]:
    return [(span.state, span.began, span.ended) for span in lane(of, name).spans]


def test_a_process_starts_is_ready_and_stops() -> None:
    made = drawn(
        *HEALTHY,
        (20, "phase", {"phase": "draining"}),
        (21, "stop", {"name": "decode-0", "node": "n"}),
        (23, "stopped", {"name": "decode-0", "forced": False, "seconds": 2.0}),
        (24, "down", {"phase": "stopped", "clean": True}),
    )
    assert spans(made) == [("starting", 0, 5), ("ready", 5, 21), ("stopping", 21, 23)]
    assert spans(made, "deployment") == [("starting", 0, 6), ("ready", 6, 20), ("stopping", 20, 24)]
    assert not made.incidents


def test_a_death_is_a_mark_and_words_and_a_restart_begins_anew() -> None:
    made = drawn(
        *HEALTHY,
        (30, "died", {"name": "decode-0", "how": "killed by SIGKILL", "code": -9}),
        (30, "restarting", {"name": "decode-0", "attempt": 1, "after_seconds": 2}),
        (32, "start", {"name": "decode-0", "node": "n"}),
        (37, "ready", {"name": "decode-0", "seconds": 5.0}),
        (40, "canary", {"name": "decode-0", "ok": True}),
    )
    assert spans(made) == [
        ("starting", 0, 5),
        ("ready", 5, 30),
        ("dead", 30, 32),
        ("starting", 32, 37),
        ("ready", 37, 40),
    ]
    assert lane(made).deaths == [30]
    assert made.incidents == ((30, "decode-0 died: killed by SIGKILL"), (30, "decode-0 is being restarted"))


def test_a_node_that_is_lost_takes_its_processes_along_and_no_others() -> None:
    made = drawn(
        *HEALTHY,
        (0, "start", {"name": "prefill-0", "node": "other"}),
        (5, "ready", {"name": "prefill-0", "seconds": 5.0}),
        (10, "agent_gone", {"node": "n", "how": "its heartbeat has ended"}),
        (12, "phase", {"phase": "degraded"}),
    )
    assert spans(made)[-1] == ("dead", 10, 12)
    assert spans(made, "prefill-0")[-1] == ("ready", 5, 12)


def test_a_line_that_cannot_be_read_and_an_unknown_event_move_nothing() -> None:
    unread = {"at": 0.0, "event": "unreadable", "text": "{"}
    unknown = {"at": 1001.0, "event": "of a later version", "name": "decode-0"}
    some = [unread, *({"at": 1000.0 + at, "event": kind, **more} for at, kind, more in HEALTHY), unknown]
    made = timeline("r", "x", some, ())
    assert made is not None
    assert (made.began, made.seconds) == (1000.0, 6.0)


def test_a_sweep_has_a_timeline_for_each_start_and_an_uneventful_one_is_folded(swept: Path) -> None:
    report = read_report([swept])
    assert [(made.run_id[-6:], len(made.windows), len(made.incidents)) for made in report.timelines] == [
        ("aaaaaa", 12, 0),
        ("bbbbbb", 12, 2),
    ]
    assert sum(not window.valid for window in report.timelines[1].windows) == 1
    text = report_page(report, [timeline_picture(number, each) for number, each in enumerate(report.timelines)])
    assert "decode-0 died: was killed by SIGKILL" in text
    assert "1 without a death, a restart or an INVALID measurement" in text
