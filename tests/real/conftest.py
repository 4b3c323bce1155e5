"""The real stack: vLLM, Mooncake and LMCache on CPU, brought up by the command that users type."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest

from pdserve.system import procfs
from pdserve.system.procfs import ProcessId
from tests.launch.deployment import REPOSITORY, Deployment, assert_nothing_left, home_in, pdserve, read_json

T = TypeVar("T")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home for run directories that the tests of one module share."""
    with home_in(tmp_path_factory.mktemp("real")) as folder:
        yield folder


def brought_up(name: str, home: Path, recipe: Path | None = None) -> Iterator[Deployment]:
    """`pdserve up RECIPE --detach` (None: recipes/NAME.yaml), and `pdserve down` at the end; then nothing is left."""
    code, output = pdserve("up", recipe or REPOSITORY / "recipes" / f"{name}.yaml", "--detach")
    deployment = Deployment(None, home, name)
    try:
        assert code == 0, output
        yield deployment
    finally:
        pdserve("down", name)
    assert_nothing_left(deployment)


class Shared(Generic[T]):
    """A thing that the tests of a module share. After a test that has ended it the next one gets another, so that each
    may come after every other."""

    def __init__(self, make: Callable[[], AbstractContextManager[T]], lives: Callable[[T], bool]) -> None:
        self._make = make
        self._lives = lives
        self._open: tuple[AbstractContextManager[T], T] | None = None

    def get(self) -> T:
        if self._open is not None and not self._lives(self._open[1]):
            self.close()
        if self._open is None:
            manager = self._make()
            self._open = manager, manager.__enter__()
        return self._open[1]

    def close(self) -> None:
        if self._open is not None:
            manager, _ = self._open
            self._open = None
            manager.__exit__(None, None, None)


def serves(deployment: Deployment) -> bool:
    return deployment.state().phase == "ready"


def status_of_all(*names: str) -> tuple[int, Any]:
    """Exit code and JSON of `pdserve status`, once every engine and cache has answered it: on a busy machine one may
    take longer than `status` waits."""
    until = time.monotonic() + 240
    while True:
        code, output = pdserve("status", *names, "--json")
        status = read_json(output)
        seen = [process[kind] for process in status["processes"].values() for kind in ("engine", "lmcache")]
        if not (silent := [record for record in seen if record is not None and record["error"] is not None]):
            return code, status
        assert time.monotonic() < until, silent


def member(tiny: Deployment, name: str, title: str) -> ProcessId:
    """A process inside an engine, by what vLLM calls it."""
    root = tiny.id_of(name)
    pids = [pid for pid in procfs.descendants(root.pid) if procfs.title(pid).startswith(title)]
    assert len(pids) == 1, pids
    identity = procfs.identify(pids[0])
    assert identity is not None
    return identity
