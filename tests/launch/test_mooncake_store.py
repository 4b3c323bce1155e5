"""The master of a Mooncake store is started, watched, and restarted or fatal as the recipe says."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch.deployment import (
    BODY,
    REPOSITORY,
    assert_nothing_left,
    free_ports,
    recipe,
    routing,
    serving,
    up,
)

pytestmark = pytest.mark.process

MASTER = [sys.executable, str(REPOSITORY / "tests/fakes/mooncake_master.py")]
NAME = "mooncake-master"


def with_store(folder: Path, **section: Any) -> Path:
    """1P1D over fakes with a store in LMCache's place."""
    # Blocks after those that `recipe` takes.
    rpc, http = free_ports(11)[-2:]
    multi = {"kind": "multi", "of": [{"kind": "mooncake", "protocol": "tcp"}, {"kind": "mooncake-store"}]}
    return recipe(
        folder,
        lmcache=None,
        prefill__connector=multi,
        mooncake_store={"segment_gib": 0.01, "buffer_gib": 0.01, "protocol": "tcp", "command": MASTER, **section},
        ports__mooncake_master=rpc,
        ports__mooncake_master_http=http,
    )


def test_it_starts_before_the_engines_is_restarted_and_ends_after_them(tmp_path: Path, pdserve_home: Path) -> None:
    with up(with_store(tmp_path), pdserve_home) as deployment:
        before = serving(deployment).id_of(NAME)
        assert deployment.started()[0] == NAME
        deployment.send_signal(NAME, signal.SIGKILL)
        deployment.command.expect("deployment is degraded")
        assert deployment.post("/v1/completions", BODY)[0] == 200
        deployment.command.expect("deployment is ready")
        assert deployment.id_of(NAME) != before
        assert routing(deployment, "prefill-0") == ["ready"]
        deployment.command.interrupt()
        assert deployment.command.finish() == 0
        assert deployment.stopped()[-1] == NAME
        assert_nothing_left(deployment)


def test_a_flag_that_it_does_not_know_ends_the_start_and_names_the_key(tmp_path: Path, pdserve_home: Path) -> None:
    with up(with_store(tmp_path, extra_args={"no_such_flag": 1}), pdserve_home) as deployment:
        assert deployment.command.finish() == 4, deployment.command.output
        assert "mooncake_store.extra_args" in deployment.command.output
        assert "prefill-0" not in deployment.started()
