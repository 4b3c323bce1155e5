"""Records of deployments that no launcher has written: for who reads one, or decides by one."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pdserve.plan.model import Plan
from pdserve.run.directory import RunDir
from pdserve.run.state import DeploymentState
from pdserve.system import procfs
from pdserve.system.process import new_token
from pdserve.system.procfs import ProcessId

GONE = ProcessId(pid=4_194_000, start_ticks=1)
"""The identity of nobody."""
HERE = socket.gethostname()


def identity_of(pid: int) -> ProcessId:
    """Return the identity of a process that lives."""
    identity = procfs.identify(pid)
    assert identity is not None
    return identity


def own_identity() -> ProcessId:
    """Return the identity of this process, which lives."""
    return identity_of(os.getpid())


def recorded_state(**fields: Any) -> DeploymentState:
    """Return the state of a run on this machine of which nothing lives, with these fields."""
    usual = {"token": new_token(), "name": "fake", "run_id": "run-1", "host": HERE, "launcher": GONE, "started_at": 0.0}
    return DeploymentState(**{**usual, **fields})


def write_record(run: RunDir, state: DeploymentState, plan: Plan | None = None) -> RunDir:
    """Write what there is of it, and make it the current run."""
    run.write(run.state, state.model_dump_json())
    if plan is not None:
        run.write(run.plan, plan.model_dump_json())
    run.point_current()
    return run


@contextmanager
def no_room(size: int) -> Iterator[None]:
    """No file may become larger meanwhile, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
