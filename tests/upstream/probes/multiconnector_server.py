"""MultiConnector over a mock and a real LMCacheMPConnector, both roles of it, against a real LMCache server.

Prints JSON: what GET /status of the server says after each case. Every prompt has four chunks, stored before.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from pdserve.connectors.selection_lookups import LookupKeeper
from pdserve.patches import effects
from tests.upstream.scheduler_lab import Lab, mock, multi

BLOCK, CHUNK, TOKENS, NUM_BLOCKS = 16, 64, 256, 128
PATIENCE_SECONDS = 60.0


class Server:
    """What its HTTP side says."""

    def __init__(self, http: int, process: subprocess.Popen[bytes]) -> None:
        self._http = http
        self._process = process

    @contextmanager
    def silent(self) -> Iterator[None]:
        """It answers nothing meanwhile: a quick server would answer a lookup within the step that sent it."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def status(self) -> dict[str, int]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._http}/status") as answer:
            document = json.load(answer)
        l1 = document["storage_manager"]["l1_manager"]
        return {
            "objects": l1["total_object_count"],
            "locked": l1["read_locked_count"],
            "jobs": document["active_prefetch_jobs"],
            "sessions": document["active_sessions"],
        }

    def until(self, holds: Callable[[dict[str, int]], bool]) -> dict[str, int]:
        """Its status as soon as it is so, or the last one: what it is told, it does a little later."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not holds(status := self.status()) and time.monotonic() < deadline:
            pass
        return status


class Deployment:
    """The scheduler of the lab, and one worker's half of LMCacheMPConnector, over real memory."""

    def __init__(self, ours: bool, port: int) -> None:
        leaf = {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": port,
                "lmcache.mp.mq_timeout": PATIENCE_SECONDS,
                "lmcache.mp.mp_transfer_mode": "engine_driven",
            },
        }
        config = multi(mock(), leaf)
        if ours:
            config["kv_connector_module_path"] = "pdserve.connectors.multi"
        self.lab = Lab(num_blocks=NUM_BLOCKS, max_num_batched_tokens=512, prefix_caching=False, connector=config)
        connectors = type(self.lab.connector)._get_connector_classes_and_configs(self.lab.config)
        _, own = connectors[1]
        self.worker = KVConnectorFactory.create_connector(
            own, KVConnectorRole.WORKER, self.lab.scheduler.kv_cache_config
        )
        self.worker.register_kv_caches({"full": torch.zeros(NUM_BLOCKS, 2, BLOCK, 1, 8)})
        self._arrived: set[str] = set()

    def step(self) -> None:
        output = self.lab.schedule()
        metadata = output.kv_connector_metadata.metadata[1]
        self.worker.bind_connector_metadata(metadata)
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        sent, received = self.worker.get_finished(output.finished_req_ids)
        known = set(self.lab.scheduler.requests)
        mocks = {load.request_id for load in self.lab.connector._connectors[0].book.loads} - self._arrived
        self._arrived |= mocks
        self.lab.update(
            output,
            finished_recving=(set(received or ()) | mocks) & known,
            finished_sending=set(sent or ()) & known,
        )

    def run(self) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.lab.scheduler.has_requests() or self.lab.scheduler.requests:
            assert time.monotonic() < deadline, f"still there: {sorted(self.lab.scheduler.requests)}"
            self.step()

    def shutdown(self) -> None:
        self.lab.connector.shutdown()
        self.worker.shutdown()


def prompt(number: int) -> list[int]:
    return list(range(number * 1000, number * 1000 + TOKENS))


def seeded(deployment: Deployment, server: Server, *numbers: int) -> None:
    before = server.status()["objects"]
    for number in numbers:
        deployment.lab.add(f"seed-{number}", [*prompt(number), 1], max_tokens=1)
    deployment.run()
    expected = before + len(numbers) * TOKENS // CHUNK
    status = server.until(lambda status: status["objects"] >= expected and not status["sessions"])
    assert status["objects"] == expected, status


def overtaken(deployment: Deployment, server: Server, number: int) -> dict[str, Any]:
    """The mock has everything: LMCache, which has not answered yet, is not waited for."""
    locked = server.status()["locked"]
    deployment.lab.add(f"r-{number}", [*prompt(number), 1], {"mock": {"matched": TOKENS}}, max_tokens=3)
    with server.silent():
        deployment.step()
    loading = deployment.lab.status(f"r-{number}")
    server.until(lambda status: status["locked"] >= locked + TOKENS // CHUNK)
    deployment.run()
    return {"after one step": loading, **server.until(lambda status: not status["sessions"])}


def aborted(deployment: Deployment, server: Server, number: int) -> dict[str, Any]:
    """The client goes when the lookup has been sent and nobody has asked for its answer."""
    locked = server.status()["locked"]
    deployment.lab.add(f"r-{number}", [*prompt(number), 1])
    with server.silent():
        deployment.step()
    assert deployment.lab.status(f"r-{number}") == "WAITING"
    server.until(lambda status: status["locked"] >= locked + TOKENS // CHUNK)
    deployment.lab.abort(f"r-{number}")
    deployment.run()
    return server.until(lambda status: not status["sessions"])


def loaded(deployment: Deployment, server: Server, number: int) -> dict[str, Any]:
    """Nobody else has the prompt: LMCache loads it, as ever."""
    deployment.lab.add(f"r-{number}", [*prompt(number), 1])
    deployment.run()
    external = deployment.lab.connector._connectors[1]
    return {"trackers": len(external.request_trackers), **server.until(lambda status: not status["sessions"])}


@contextmanager
def running() -> Iterator[tuple[Server, int]]:
    with socket.socket() as first, socket.socket() as two:
        for each in (first, two):
            each.bind(("127.0.0.1", 0))
        port, http = first.getsockname()[1], two.getsockname()[1]
    command = [sys.executable, "-m", "lmcache.v1.multiprocess.http_server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--http-host", "127.0.0.1", "--http-port", str(http), "--l1-size-gb", "0.25", "--eviction-policy"]
    command += ["LRU", "--chunk-size", str(CHUNK), "--supported-transfer-mode", "engine_driven"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    server = Server(http, process)
    try:
        deadline = time.monotonic() + 300
        while True:
            assert process.poll() is None, f"the server ended with {process.returncode}"
            assert time.monotonic() < deadline, "the server does not start"
            try:
                server.status()
                break
            except OSError:
                time.sleep(0.1)
        yield server, port
    finally:
        process.terminate()
        process.wait(30)


def main() -> None:
    results: dict[str, Any] = {}
    with running() as (server, port):
        ours = Deployment(True, port)
        seeded(ours, server, 1, 2, 3, 4, 5)
        results["loaded"] = loaded(ours, server, 1)
        results["overtaken"] = overtaken(ours, server, 2)
        results["aborted"] = aborted(ours, server, 3)
        results["effects"] = {name: value for (_, name), value in effects.totals().items()}
        LookupKeeper.settle = lambda self: self._unwanted.clear()  # type: ignore[method-assign]
        results["overtaken without keeper"] = overtaken(ours, server, 4)
        ours.shutdown()
        upstream = Deployment(False, port)
        results["upstream aborted"] = aborted(upstream, server, 5)
        upstream.shutdown()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
