"""Requests to a launcher: what it answers arrives, whenever it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.errors import StateError
from pdserve.run.directory import RunDir
from pdserve.run.inbox import Down, Reply, answer, ask, take


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, "fake", "run-1")


class Ends:
    """A launcher that answers what it has taken, if it does, and has ended when it is looked for."""

    def __init__(self, run: RunDir, reply: Reply | None) -> None:
        self._run = run
        self._reply = reply

    def alive(self) -> bool:
        for name, _ in take(self._run):
            if self._reply is not None:
                answer(self._run, name, self._reply)
        return False


def test_the_last_word_of_a_launcher_that_ends_is_the_answer(run: RunDir) -> None:
    last = Reply(exit_code=5, message="the agent of b is still stopping its processes")
    assert ask(run, Down(), seconds=60, alive=Ends(run, last).alive) == last
    assert list(run.inbox.iterdir()) == []


def test_one_that_ends_without_a_word_is_an_error(run: RunDir) -> None:
    with pytest.raises(StateError, match="ended before it answered"):
        ask(run, Down(), seconds=60, alive=Ends(run, None).alive)
    assert list(run.inbox.iterdir()) == []
