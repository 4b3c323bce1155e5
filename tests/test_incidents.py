"""What in a run's history disturbs a measurement or a proof: one list, for `bench`, `verify` and the report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from pdserve.bench.validity import Invalid, process_died
from pdserve.cli.prove import _meanwhile
from pdserve.report.rows import timeline
from pdserve.run.directory import RunDir
from pdserve.run.history import INCIDENTS, incident
from tests.bench.evidence import healthy
from tests.tables import each_row

RECORDED: dict[str, dict[str, Any]] = {
    "died": {"name": "decode-0", "member": None, "how": "exited with code 1", "seconds": 3.0},
    "late": {"name": "decode-0", "seconds": 60.0},
    "given_up": {"name": "decode-0", "why": "did not answer for 30 s"},
    "restarting": {"name": "decode-0", "attempt": 1, "after_seconds": 1.0},
    "bad_peer": {"name": "prefill-1", "new": "decode-0", "crossed": ["prefill-0"], "restarted": True},
    "cache_down": {"name": "lmcache-0", "engines": ["prefill-0"]},
    "engine_not_back": {"name": "prefill-0", "attached": False},
    "unresponsive": {"name": "decode-0", "why": "no answer within 5 s"},
    "out_of_sockets": {"name": "prefill-0", "times": 2, "todo": "raise `ulimit -n`"},
    "agent_gone": {"node": "far", "how": "not heard for 20 s"},
    "failed": {"error": "decode-0 died\nsee its log", "exit_code": 3},
}
"""With the fields that the launcher records."""
OTHERS = (
    "ready",
    "swapped",
    "responsive",
    "sockets_again",
    "agent_left",
    "rolling",
    "rolled",
    "progress",
    "phase",
    "stopped",
)


@each_row("kind", INCIDENTS)
def test_each_of_them_counts_everywhere(kind: str, tmp_path: Path) -> None:
    event = {"at": 1.0, "event": kind, **RECORDED[kind]}
    what = incident(event)
    assert what is not None
    answer = process_died(replace(healthy(), events=(event,)))
    assert isinstance(answer, Invalid), "bench"
    assert answer.text == what
    drawn = timeline("run-1", "x", [event], ())
    assert drawn is not None
    assert drawn.incidents[0][1].startswith(what), "report"
    run_dir = RunDir(tmp_path)
    run_dir.append_event(kind, **RECORDED[kind])
    assert len(_meanwhile(run_dir, 0, failed=False)) == 1, "verify"


def test_other_events_are_none_and_what_names_no_process_is_the_deployments() -> None:
    assert not [kind for kind in OTHERS if incident({"at": 1.0, "event": kind, "name": "decode-0"}) is not None]
    assert incident({"event": "failed", **RECORDED["failed"]}) == "the deployment failed"
    assert incident({"event": "failed", "name": "decode-0"}) == "decode-0 failed"
    assert incident({"event": "agent_gone", **RECORDED["agent_gone"]}) == "far lost its agent"
