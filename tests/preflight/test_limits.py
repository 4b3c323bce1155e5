"""Limits that agents hand on to what they start, with a real child that has low ones."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from typing import Any

import pytest

from pdserve.preflight.facts import Limit
from pdserve.preflight.resources import ENGINE_FILES, find_memlock, find_open_files
from tests.launch.deployment import REPOSITORY
from tests.plan import kit
from tests.preflight.kit import GIB, UNLIMITED, facts, here
from tests.preflight.test_rdma import rdma


def limit(soft: int, hard: int | None = None) -> Limit:
    return Limit(soft=soft, hard=soft if hard is None else hard)


@pytest.mark.parametrize(
    ("locked", "capable", "status"),
    [
        (UNLIMITED, False, "ok"),
        (limit(64 * 1024), False, "failed"),
        (limit(64 * 1024), True, "ok"),
        (limit(8 << 20, 200 * GIB), False, "failed"),
        (limit(16 * GIB), False, "warning"),
        (limit(200 * GIB), False, "ok"),
    ],
    ids=["unlimited", "an image's", "with the capability", "a hard one helps nobody", "a part", "all of memory"],
)
def test_locked_memory_for_rdma(locked: Limit, capable: bool, status: str) -> None:
    [finding] = find_memlock("here", here(rdma()).processes, facts(memlock=locked, ipc_lock=capable))
    assert finding.status == status
    assert (finding.fix is None) == (status == "ok")


def test_locked_memory_does_not_matter_over_tcp() -> None:
    assert find_memlock("here", here().processes, facts(memlock=limit(1))) == []


@pytest.mark.parametrize(
    ("files", "roles", "status"),
    [
        (UNLIMITED, ("prefill", "decode", "proxy"), "ok"),
        (limit(1024, ENGINE_FILES), ("prefill", "decode"), "ok"),
        (limit(256, ENGINE_FILES), ("proxy",), "ok"),
        (limit(1024, 2048), ("proxy",), "warning"),
        (limit(256, 512), ("proxy",), "failed"),
        (limit(256, ENGINE_FILES), ("lmcache",), "failed"),
        (limit(1024, ENGINE_FILES), ("lmcache",), "ok"),
        (limit(256, ENGINE_FILES), ("prefill",), "ok"),
        (limit(256, 512), ("prefill",), "failed"),
        (limit(4096), ("prefill",), "warning"),
    ],
)
def test_open_files(files: Limit, roles: tuple[str, ...], status: str) -> None:
    plan = here(kit.with_lmcache())
    starting = [process for process in plan.processes if process.role in roles]
    [finding] = find_open_files("here", starting, facts(open_files=files))
    assert finding.status == status


def child(code: str, *, lowered: tuple[int, int]) -> Any:
    """What `code` prints as JSON in a child with a resource limit (which, value) of its own."""
    which, value = lowered
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
        preexec_fn=lambda: resource.setrlimit(which, (value, value)),
    )
    return json.loads(done.stdout)


_GATHER = "from pdserve.preflight.facts import gather; print(gather(platform='cpu').model_dump_json())"


@pytest.mark.process
def test_a_process_with_few_open_files() -> None:
    facts_of_child = child(_GATHER, lowered=(resource.RLIMIT_NOFILE, 200))
    [finding] = find_open_files("here", here().processes, facts(open_files=facts_of_child["open_files"]))
    assert (finding.status, finding.value) == ("failed", "soft 200, hard 200")
    assert "ulimit -n" in str(finding.fix)


@pytest.mark.process
def test_a_process_with_little_locked_memory() -> None:
    facts_of_child = child(_GATHER, lowered=(resource.RLIMIT_MEMLOCK, 64 * 1024))
    [finding] = find_memlock("here", here(kit.on_gpus(), rdma()).processes, facts(memlock=facts_of_child["memlock"]))
    assert finding.status == "failed"
    assert "ulimit -l unlimited" in str(finding.fix)
