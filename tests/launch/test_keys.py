"""The engine key lies outside the run directory for as long as its run lasts, and not longer."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from pdserve.process import pid_end
from pdserve.rundir import RunDir
from tests.launch.deployment import LINE_SECONDS, Deployment, assert_nothing_left, pdserve, recipe, up
from tests.launch.test_serving_faults import serving


def keys() -> list[str]:
    return sorted(file.name for file in Path(os.environ["XDG_RUNTIME_DIR"]).glob("pdserve-*.key"))


@pytest.mark.parametrize("options", [(), ("--detach",)], ids=["foreground", "detached"])
def test_an_up_that_finds_another_launcher_leaves_none(
    tmp_path: Path, pdserve_home: Path, options: tuple[str, ...]
) -> None:
    other = RunDir.create(pdserve_home, "fake", "run-of-another")
    with other.only_launcher():
        code, output = pdserve("up", recipe(tmp_path), *options)
    assert code != 0, output
    assert keys() == []


def test_a_run_keeps_its_own_until_it_is_over(tmp_path: Path, pdserve_home: Path) -> None:
    file = recipe(tmp_path)
    with up(file, pdserve_home) as deployment:
        own = serving(deployment).run.key_file.name
        assert pdserve("up", file)[1].endswith("already up")
        assert keys() == [own]
    assert keys() == []


def killed(deployment: Deployment) -> str:
    """Kills the launcher, as the kernel does when memory is short; the key that it could not take along."""
    own = serving(deployment).run.key_file.name
    deployment.send_signal("launcher", signal.SIGKILL)
    deployment.command.finish()
    asyncio.run(asyncio.wait_for(pid_end(deployment.id_of("guard").pid), LINE_SECONDS))
    assert keys() == [own]
    return own


def test_down_takes_that_of_a_killed_launcher_away(tmp_path: Path, pdserve_home: Path) -> None:
    with up(recipe(tmp_path), pdserve_home) as deployment:
        killed(deployment)
        assert pdserve("down") == (0, "fake: not running")
        assert keys() == []


def test_so_does_the_next_up(tmp_path: Path, pdserve_home: Path) -> None:
    with up(recipe(tmp_path), pdserve_home) as deployment:
        before = killed(deployment)
    with up(recipe(tmp_path), pdserve_home) as deployment:
        own = serving(deployment).run.key_file.name
        assert own != before
        assert keys() == [own]
    assert_nothing_left(deployment)
