"""What a new program takes over from the one before it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import StartError
from pdserve.pd.limits.admission import CELLS_PER_PROCESS
from pdserve.pd.limits.quotas import cells_needed
from pdserve.pd.processes import handover, shared_numbers
from pdserve.pd.processes.control_lines import ControlLines
from pdserve.pd.processes.handover import Heir, Inheritance, SharedFiles
from pdserve.pd.processes.supervisor import Pauses
from pdserve.pd.workers.load import LoadBoard
from pdserve.proxy import _LAYOUT, main, shared_with
from tests.tables import each_row


@pytest.fixture
def file() -> Iterator[int]:
    file = os.memfd_create("shared")
    yield file
    os.close(file)


def handed_over(inheritance: Inheritance, monkeypatch: pytest.MonkeyPatch) -> Inheritance | None:
    """Return what the new program takes of it."""
    began: dict[str, str] = {}
    monkeypatch.setattr(os, "execve", lambda _, __, environ: began.update(environ))
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *_: None)
    handover.hand_over(inheritance, ())
    monkeypatch.setenv("PDSERVE_PROXY_SUCCESSION", began["PDSERVE_PROXY_SUCCESSION"])
    return handover.take_inheritance()


def inheritance(shared: SharedFiles | None = None, beats: int | None = None) -> Inheritance:
    heir = Heir(0, 7, os.dup(1), os.dup(1), False, "heard", "unread", beats)
    return Inheritance(3, [], [heir], ['{"remove": "decode-3"}'], {"decode-0": "ready"}, "", False, "{}", shared)


def test_all_that_is_handed_over_is_taken_and_stays_in_this_process(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for known in (inheritance(), inheritance(SharedFiles(file, [file], _LAYOUT), file)):
        assert handed_over(known, monkeypatch) == known
        assert shared_with(known) == known.shared
        assert not any(os.get_inheritable(end) for heir in known.children for end in (heir.control, heir.asks, file))
        for end in (known.children[0].control, known.children[0].asks):
            os.close(end)
    assert handover.take_inheritance() is None


def test_a_program_of_another_format_is_not_handed_anything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "proxy.json"
    for other in (handover.FORMAT - 1, handover.FORMAT + 1):
        assert main(["--config", str(config), handover.CHECK, str(other)]) == StartError.exit_code
        assert "was started by another version of pdserve" in capsys.readouterr().err


def test_a_new_layout_of_shared_numbers_has_a_new_number() -> None:
    """Else processes of two programs that share a file count at the other one's places."""
    sizes = (CELLS_PER_PROCESS, LoadBoard.cells(2), cells_needed(2))
    assert (shared_numbers.LAYOUT, sizes) == (4, (6, 2816, 67584))


def test_numbers_that_another_version_has_laid_out_are_not_used(file: int) -> None:
    assert shared_with(inheritance(SharedFiles(file, [], "0.0.1"))) is None


# --- how long the place of a proxy's process stays empty after its end


def lived(*lives: float) -> list[float]:
    """The pause after each of these lives; it is waited for."""
    now = [1000.0]
    pauses, ended = Pauses(lambda: now[0]), []
    for seconds in lives:
        pauses.begun(0)
        now[0] += seconds
        ended.append(pauses.ended(0))
        now[0] += ended[-1]
        assert pauses.due() == [0]
    return ended


def test_the_pause_doubles_with_each_short_life_and_has_a_limit() -> None:
    assert lived(*[0.1] * 10) == [0, 0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert lived(*[0.1] * 1100)[-1] == 30
    assert lived(1, 1, 1, 60, 1, 1) == [0, 0.5, 1, 0, 0, 0.5], "after a long life it begins anew"


# --- what a new process of the proxy hears of what came before it


ADD: dict[str, Any] = {"add": {"name": "decode-3", "role": "decode", "url": "http://node:1"}}
REMOVE: dict[str, Any] = {"remove": "decode-3"}


def state(name: str, what: str) -> dict[str, Any]:
    return {"worker": name, "state": what}


def heard_again(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    lines = ControlLines()
    for message in messages:
        assert lines.remember(json.dumps(message).encode()) == message
    return [json.loads(line) for line in lines.again()]


ALL: dict[str, Any] = {"workers": [{"name": "decode-0"}, {"name": "decode-1"}], "states": {"decode-0": "ready"}}


@each_row(
    "said, heard",
    [
        # Only the last state of a worker counts.
        (
            [state("decode-0", "ready"), state("decode-1", "ready"), state("decode-0", "dead")],
            [state("decode-0", "dead"), state("decode-1", "ready")],
        ),
        # Workers come and go in their order.
        (
            [state("decode-0", "ready"), ADD, state("decode-3", "draining"), {"reload": True}],
            [ADD, state("decode-0", "ready"), state("decode-3", "draining")],
        ),
        # A new worker is not what the one before it was, and has states of its own.
        ([ADD, state("decode-3", "dead"), REMOVE, ADD], [ADD]),
        (
            [state("decode-3", "dead"), REMOVE, ADD, state("decode-3", "draining")],
            [REMOVE, ADD, state("decode-3", "draining")],
        ),
        # A line of all workers replaces what was heard before, but for the workers of an admin.
        (
            [state("decode-0", "dead"), {"workers": [{"name": "decode-1"}], "states": {}}, ALL],
            [ALL],
        ),
        (
            [{"remove": "decode-0"}, ADD, state("decode-3", "draining"), ALL],
            [ALL, ADD, state("decode-3", "draining")],
        ),
    ],
)
def test_what_a_new_process_hears(said: list[dict[str, Any]], heard: list[dict[str, Any]]) -> None:
    assert heard_again(*said) == heard


@each_row("before, kept", [((), []), ((REMOVE,), [REMOVE])])
def test_only_how_a_worker_ended_is_heard_again(before: tuple[dict[str, Any], ...], kept: list[dict[str, Any]]) -> None:
    other = {"add": {"name": "decode-4", "role": "decode", "url": "http://node:2"}}
    often = [ADD, REMOVE] * 1000
    assert heard_again(*before, *often) == kept
    assert heard_again(*before, *often, other, ADD) == [other, *kept, ADD]


@each_row("line", [b"", b"no json", b"[1]", b"\xff", b'{"add": 1}', b'{"add": {}}', b'{"remove": ["a"]}'])
def test_what_is_no_message_or_names_nobody_changes_nothing(line: bytes) -> None:
    lines = ControlLines()
    lines.remember(b'{"worker": "decode-0", "state": "ready"}')
    lines.remember(line)
    assert lines.again() == [b'{"worker": "decode-0", "state": "ready"}']
