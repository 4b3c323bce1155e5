"""What a new program takes over from the one before it, which may be older."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest

from pdserve import __version__
from pdserve.pd.processes import handover
from pdserve.pd.processes.child import Configured
from pdserve.pd.processes.handover import Inheritance, SharedFiles
from pdserve.proxy import shared_with

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


def taken(fields: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> Inheritance:
    file = os.memfd_create("succession")  # `taken` closes it
    os.write(file, json.dumps(fields).encode())
    os.lseek(file, 0, os.SEEK_SET)
    monkeypatch.setenv("PDSERVE_PROXY_SUCCESSION", str(file))
    inheritance = handover.taken()
    assert inheritance is not None
    return inheritance


def test_what_an_older_program_does_not_hand_over_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    inherited = taken(OLDEST, monkeypatch)
    assert (inherited.generation, inherited.told) == (3, OLDEST["told"])
    assert (inherited.config, inherited.shared, shared_with(inherited)) == ("", None, None)


def test_shared_files_are_taken_over_and_stay_in_this_process(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    os.set_inheritable(file, True)
    inherited = taken(OLDEST | {"shared": {"numbers": file, "pages": [file], "version": __version__}}, monkeypatch)
    assert shared_with(inherited) == SharedFiles(file, [file], __version__)
    assert not os.get_inheritable(file)


def test_numbers_that_another_version_has_laid_out_are_not_used(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inherited = taken(OLDEST | {"shared": {"numbers": file, "pages": [], "version": "0.0.1"}}, monkeypatch)
    assert shared_with(inherited) is None


def test_after_a_restart_that_failed_all_is_as_in_the_program_before() -> None:
    before, new = SharedFiles(7, [8], __version__), SharedFiles(9, [10], __version__)
    configured = Configured(b"new", b"before", shared=new, shared_before=before)
    assert (configured.text, configured.shared) == (b"new", new)
    configured.now(b"read again", old=True)
    configured.go_back()
    assert (configured.text, configured.shared) == (b"read again", before)


def test_after_one_without_shared_files_the_new_ones_stay() -> None:
    new = SharedFiles(9, [10], __version__)
    configured = Configured(b"new", shared=new)
    configured.go_back()
    assert (configured.text, configured.shared) == (b"new", new)
