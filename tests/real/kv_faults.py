"""Faults of a KV connector inside a running engine, told by files: a vLLM plugin, loaded beside pdserve's own.

FOLDER/notice       holds the name of a set of the next report of a worker's transfers: finished_recving or
                    finished_sending. A request that never was and the last one whose KV has arrived are added to it,
                    as if a report came too late or twice; then the file is gone.
FOLDER/hold-loads   while it exists, loads from LMCache are not started; then they are, into the blocks they had.
FOLDER/hold-steps   while it exists, the worker begins no step. Unlike a stopped process it is nothing that a supervisor
                    sees: the engine has requests and answers none.

FOLDER is KV_FAULTS_FOLDER. tests/real/kv_corruption.py has more of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.real import kv_corruption

FOLDER = "KV_FAULTS_FOLDER"
NAME = "kv_faults"
GONE = "a-request-that-never-was"
NOTICE, HOLD_LOADS, HOLD_STEPS = "notice", "hold-loads", "hold-steps"


def installed(folder: Path) -> dict[str, str]:
    """The environment with which an engine loads this plugin; `folder` is where its files go."""
    info = folder / f"{NAME}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{NAME} = {__name__}:load\n")
    root = Path(__file__).parents[2]
    return {"PYTHONPATH": f"{folder}{os.pathsep}{root}", "VLLM_PLUGINS": NAME, FOLDER: str(folder)}


@contextmanager
def held(order: Path) -> Iterator[None]:
    """For the time of a `with` block; `order`: the file of what is held."""
    order.touch()
    try:
        yield
    finally:
        order.unlink()


def load() -> None:
    """What vLLM calls in each of its processes; only a worker's connector reports transfers and starts loads."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    create = KVConnectorFactory.create_connector
    folder = Path(os.environ[FOLDER])

    # Not the classes: whatever imports lmcache before the worker's kernels are registered breaks their registration.
    def create_connector(*args: Any, **kwargs: Any) -> Any:
        connector = create(*args, **kwargs)
        if type(connector).__name__ == "MooncakeConnector":
            _report_late(connector, folder / NOTICE)
        if hasattr(connector, "worker_adapter"):
            _hold_loads(connector, folder / HOLD_LOADS)
        _hold_steps(connector, folder / HOLD_STEPS)
        kv_corruption.install(connector, folder)
        return connector

    KVConnectorFactory.create_connector = create_connector


def _report_late(connector: Any, order: Path) -> None:
    original = connector.get_transfer_results
    received: list[str] = []

    def get_transfer_results(finished_req_ids: set[str]) -> Any:
        results = original(finished_req_ids)
        received.extend(results.finished_recving)
        if order.exists():
            named: set[str] = getattr(results, order.read_text())
            order.unlink()
            named |= {GONE, *received[-1:]}
        return results

    connector.get_transfer_results = get_transfer_results


def _hold_loads(connector: Any, order: Path) -> None:
    submit, report = connector.worker_adapter.batched_submit_retrieve_requests, connector.get_transfer_results
    held: list[tuple[Any, Any]] = []

    def batched_submit_retrieve_requests(*args: Any, **kwargs: Any) -> None:
        if order.exists():
            held.append((args, kwargs))
        else:
            submit(*args, **kwargs)

    def get_transfer_results(finished_req_ids: set[str]) -> Any:
        if held and not order.exists():
            for args, kwargs in held:
                submit(*args, **kwargs)
            held.clear()
        return report(finished_req_ids)

    connector.worker_adapter.batched_submit_retrieve_requests = batched_submit_retrieve_requests
    connector.get_transfer_results = get_transfer_results


def _hold_steps(connector: Any, order: Path) -> None:
    begin = connector.start_load_kv

    def start_load_kv(*args: Any, **kwargs: Any) -> None:
        while order.exists():
            time.sleep(0.01)
        begin(*args, **kwargs)

    connector.start_load_kv = start_load_kv
