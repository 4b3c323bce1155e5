"""A shortage of sockets: one from its first lack to ten seconds without another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdserve.node.shortages import QUIET_SECONDS, SocketShortage


class Engine:
    """Its records, and a clock that the test turns."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.now = 0.0
        self.shortage = SocketShortage(folder, clock=lambda: self.now)

    def has_lacked(self, times: int, process: str = "worker") -> None:
        effects = {"mooncake-pulls": {"out-of-sockets": times, "peers-lost": 1}}
        record = {"pid": 1, "session": 1, "process": process, "kind": process, "active": [], "effects": effects}
        (self._folder / f"{process}.json").write_text(json.dumps(record))


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path)


def test_an_engine_that_lacks_nothing_has_no_shortage(engine: Engine) -> None:
    assert not engine.shortage.look()
    engine.has_lacked(0)
    assert not engine.shortage.look()
    assert not engine.shortage.lasts


def test_a_shortage_begins_once_however_often_there_is_no_socket(engine: Engine) -> None:
    engine.has_lacked(1)
    assert engine.shortage.look()
    for times in (50, 90):
        engine.now += 2
        engine.has_lacked(times)
        assert not engine.shortage.look()
    assert engine.shortage.lasts
    assert engine.shortage.times == 90


def test_it_ends_when_there_was_none_for_a_while_and_another_one_may_follow(engine: Engine) -> None:
    engine.has_lacked(1)
    engine.shortage.look()
    engine.now += QUIET_SECONDS
    assert engine.shortage.look()
    assert not engine.shortage.lasts
    engine.has_lacked(2)
    assert engine.shortage.look()
    assert engine.shortage.lasts


def test_every_process_of_the_engine_counts(engine: Engine) -> None:
    engine.has_lacked(1)
    engine.shortage.look()
    engine.now += QUIET_SECONDS / 2
    engine.has_lacked(1, "engine-core")
    engine.shortage.look()
    engine.now += QUIET_SECONDS / 2
    engine.shortage.look()
    assert (engine.shortage.lasts, engine.shortage.times) == (True, 2)
