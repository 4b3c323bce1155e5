"""What `status` says of a deployment that is over."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.deployment import pdserve, recipe, up

pytestmark = pytest.mark.process

DIES = {"FAKE_DIE_AT": "load", "FAKE_EXIT_CODE": "7"}


def test_a_dead_process_keeps_the_reason_of_its_own_death_and_nothing_is_open_any_more(
    tmp_path: Path, pdserve_home: Path
) -> None:
    with up(recipe(tmp_path, decode__env=DIES), pdserve_home) as deployment:
        assert deployment.command.finish() == 4, deployment.command.output
    assert deployment.state().processes["decode-0"].note == "exited with code 7"
    assert not deployment.events("agent_gone"), "an agent that leaves after its work is no news"
    assert "agent of" not in deployment.command.output
    code, output = pdserve("status")
    assert code == 5
    assert "open without key" not in output
