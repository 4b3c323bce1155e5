"""What a new program takes over from the one before it, which may be older."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest

from pdserve.pd.limits.admission import CELLS_PER_PROCESS
from pdserve.pd.limits.quotas import cells_needed
from pdserve.pd.processes import handover, shared_numbers
from pdserve.pd.processes.child import Configured
from pdserve.pd.processes.handover import Inheritance, SharedFiles
from pdserve.pd.workers.load import LoadBoard
from pdserve.proxy import _LAYOUT, shared_with

OLDEST = {
    "generation": 3,
    "sockets": [],
    "children": [],
    "told": ['{"remove": "decode-3"}'],
    "states": {},
    "partial": "",
    "stdin_ended": False,
}


@pytest.fixture
def file() -> Iterator[int]:
    file = os.memfd_create("shared")
    yield file
    os.close(file)


def taken(
    fields: dict[str, object], monkeypatch: pytest.MonkeyPatch, shared: dict[str, object] | None = None
) -> Inheritance:
    file = os.memfd_create("succession")  # `taken` closes it
    os.write(file, json.dumps(fields).encode())
    os.lseek(file, 0, os.SEEK_SET)
    monkeypatch.setenv("PDSERVE_PROXY_SUCCESSION", str(file))
    if shared is not None:
        monkeypatch.setenv("PDSERVE_PROXY_SHARED", json.dumps(shared))
    inheritance = handover.taken()
    assert inheritance is not None
    return inheritance


def test_what_an_older_program_does_not_hand_over_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    inherited = taken(OLDEST, monkeypatch)
    assert (inherited.generation, inherited.told) == (3, OLDEST["told"])
    assert (inherited.config, inherited.shared, shared_with(inherited)) == ("", None, None)


def test_what_only_a_newer_program_knows_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert taken(OLDEST | {"of_tomorrow": 1}, monkeypatch).generation == 3


def test_an_older_program_gets_no_field_that_it_does_not_know(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end with its first look at it, and with it all processes and streams."""
    began: dict[str, str] = {}
    monkeypatch.setattr(os, "execve", lambda _, __, environ: began.update(environ))
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *_: None)
    known = Inheritance(3, [], [], [], {}, "", False, "", SharedFiles(file, [file], _LAYOUT))
    handover.hand_over(known, ())
    with os.fdopen(int(began["PDSERVE_PROXY_SUCCESSION"])) as source:
        assert json.load(source).keys() == OLDEST.keys() | {"config"}
    assert json.loads(began["PDSERVE_PROXY_SHARED"])["numbers"] == file


def test_who_changes_what_processes_share_changes_the_number_of_its_layout() -> None:
    """Else processes of two programs that share a file count at the other one's places."""
    sizes = (CELLS_PER_PROCESS, LoadBoard.cells(2), cells_needed(2))
    assert (shared_numbers.LAYOUT, sizes) == (3, (6, 2816, 132096))


def test_shared_files_are_taken_over_and_stay_in_this_process(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    os.set_inheritable(file, True)
    inherited = taken(OLDEST, monkeypatch, {"numbers": file, "pages": [file], "version": _LAYOUT})
    assert shared_with(inherited) == SharedFiles(file, [file], _LAYOUT)
    assert not os.get_inheritable(file)


def test_numbers_that_another_version_has_laid_out_are_not_used(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inherited = taken(OLDEST, monkeypatch, {"numbers": file, "pages": [], "version": "0.0.1"})
    assert shared_with(inherited) is None


def test_after_a_restart_that_failed_all_is_as_in_the_program_before() -> None:
    before, new = SharedFiles(7, [8], _LAYOUT), SharedFiles(9, [10], _LAYOUT)
    configured = Configured(b"new", b"before", shared=new, shared_before=before)
    assert (configured.text, configured.shared) == (b"new", new)
    configured.now(b"read again", old=True)
    configured.go_back()
    assert (configured.text, configured.shared) == (b"read again", before)


def test_after_one_without_shared_files_the_new_ones_stay() -> None:
    new = SharedFiles(9, [10], _LAYOUT)
    configured = Configured(b"new", shared=new)
    configured.go_back()
    assert (configured.text, configured.shared) == (b"new", new)
