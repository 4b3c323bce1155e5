"""External load balancing while serving: every rank is a worker of the proxy, and an instance lives and dies as one."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.launch.deployment import (
    BODY,
    Deployment,
    assert_nothing_left,
    free_ports,
    pdserve,
    recipe,
    routing,
    until,
    up,
)

pytestmark = pytest.mark.process

RANKS = ("prefill-0", "prefill-0-rank1")


@contextmanager
def serving(folder: Path, home: Path, policy: str) -> Iterator[Deployment]:
    """Two prefill ranks with a server each, and one decode."""
    file = recipe(
        folder,
        lmcache=None,
        prefill={
            "connector": {"kind": "mooncake", "protocol": "tcp"},
            "parallel": {"dp": 2, "load_balancing": "external"},
            "restart": {"policy": policy, "backoff_seconds": 0.1},
        },
        ports__dp_master=free_ports(10)[-1],
    )
    (folder / "model" / "config.json").write_text('{"num_local_experts": 4}')
    with up(file, home) as deployment:
        deployment.command.expect("serving fake at")
        yield deployment


def prefilled(deployment: Deployment) -> list[str]:
    """The prefills of four requests, by the proxy's log."""
    before = len(proxy_log(deployment))
    assert [deployment.post("/v1/completions", BODY)[0] for _ in range(4)] == [200] * 4
    until(lambda: len(proxy_log(deployment)) >= before + 4)  # lines are written a moment later
    return [name for line in proxy_log(deployment)[before:] for name in RANKS[::-1] if name in line]


def proxy_log(deployment: Deployment) -> list[str]:
    process = deployment.run.read_plan().process("proxy")
    return [line for line in (deployment.run.path / process.log).read_text().splitlines() if "completions" in line]


def test_requests_go_to_the_servers_of_all_ranks(tmp_path: Path, pdserve_home: Path) -> None:
    with serving(tmp_path, pdserve_home, "never") as deployment:
        assert [worker.name for worker in deployment.run.read_plan().proxy.workers] == [*RANKS, "decode-0"]
        assert set(prefilled(deployment)) == set(RANKS)


def test_a_rank_that_dies_takes_its_instance_out_and_all_of_it_comes_back(tmp_path: Path, pdserve_home: Path) -> None:
    with serving(tmp_path, pdserve_home, "on-failure") as deployment:
        before = {name: deployment.id_of(name) for name in RANKS}
        deployment.send_signal("prefill-0-rank1", signal.SIGKILL)
        deployment.command.expect("prefill-0    restart 1")
        deployment.command.expect("deployment is ready")
        for name in RANKS:
            assert deployment.id_of(name) != before[name]
            assert routing(deployment, name)[-3:] == ["dead", "starting", "ready"]
        assert set(prefilled(deployment)) == set(RANKS)


def test_the_death_of_one_rank_of_the_only_instance_ends_the_deployment(tmp_path: Path, pdserve_home: Path) -> None:
    with serving(tmp_path, pdserve_home, "never") as deployment:
        deployment.send_signal("prefill-0-rank1", signal.SIGKILL)
        assert deployment.command.finish() == 5
        assert "error: prefill-0-rank1@" in deployment.command.output
        assert_nothing_left(deployment)


def test_a_restart_of_one_rank_is_one_of_its_instance(tmp_path: Path, pdserve_home: Path) -> None:
    with serving(tmp_path, pdserve_home, "never") as deployment:
        before = {name: deployment.id_of(name) for name in RANKS}
        code, output = pdserve("restart", "prefill-0-rank1")
        assert code == 0, output
        for name in RANKS:
            assert deployment.id_of(name) != before[name]
            assert routing(deployment, name)[-3:] == ["draining", "starting", "ready"]
        assert set(prefilled(deployment)) == set(RANKS)
