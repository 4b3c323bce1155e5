"""A prefill and a decode engine with vLLM's real scheduler and MooncakeConnector, and no model.

Each step goes through the real Scheduler, the pickled metadata, the real worker half of the connector with the real
transfer engine over TCP, and back. The KV of a block is whatever a test writes into the tensor.

Prefill's abort timeout is 6 s without the patches and 60 s with them (upstream's default: 480 s): without them most
scenarios wait for it. With them nothing does, so that it can be far longer than whatever a busy machine takes.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_HOST_IP": "127.0.0.1", "MC_FORCE_TCP": "1", "GLOG_minloglevel": "3", "MC_LOG_LEVEL": "ERROR"}

import torch
import zmq.asyncio
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as upstream

from pdserve.patches import effects
from pdserve.patches.mooncake import bootstrap, cpu_device, pulls, requests, sends, withdrawals
from tests.upstream.engine_config import LAYER, kv_cache_config
from tests.upstream.run import all_hold, quiet_port, verdict
from tests.upstream.scheduler_lab import Lab, group_of_one, worker_report

ABORT_TIMEOUT = "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"
"""How long prefill keeps KV that no decode fetches. The connector reads it whenever it needs it."""
os.environ[ABORT_TIMEOUT] = "6"
PATCHED_ABORT_SECONDS = 60
WATCHED, LONG = 3.0, 24.0
"""Seconds. WATCHED: how long it is seen that something does not happen. LONG: for what must happen."""
PATCHES = (requests.PATCH, sends.PATCH, pulls.PATCH, bootstrap.BOOTSTRAP)
_PR_SET_PDEATHSIG = 1
_engines: list[Engine] = []
"""For good: a worker that is collected shuts down in whichever thread that happens, and can hang there."""
_prepared: list[tuple[Any, Any]] = []
_tokens = iter(range(100, 10**9))
_building = threading.Lock()
"""The environment, the current configuration and what stands in for the groups belong to the process."""
BLOCKS, BLOCK_SIZE = 256, 32
"""The smallest blocks that the CPU's attention backend takes."""


class Engine:
    """One engine. `role`: kv_producer or kv_consumer. A prefill has a bootstrap server of its own."""

    def __init__(self, role: str, *, policy: str = "fail") -> None:
        _engines.append(self)
        with _building:
            self._build(role, policy)

    def _build(self, role: str, policy: str) -> None:
        self.port = quiet_port()
        os.environ["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = str(self.port)
        transfer = {
            "kv_connector": "MooncakeConnector",
            "kv_role": role,
            "kv_connector_extra_config": {"mooncake_protocol": "tcp", "num_workers": 10},
        }
        self.lab = Lab(
            num_blocks=BLOCKS, block_size=BLOCK_SIZE, connector=transfer, load_failure_policy=policy, max_num_seqs=64
        )
        self.lab.config.scheduler_config.disable_hybrid_kv_cache_manager = False
        layout = kv_cache_config(BLOCKS, BLOCK_SIZE, None)
        with set_current_vllm_config(self.lab.config), group_of_one(upstream):
            self.connector = upstream.MooncakeConnector(self.lab.config, KVConnectorRole.WORKER, layout)
        self.worker = self.connector.connector_worker
        self.kv = torch.zeros((BLOCKS, 1, BLOCK_SIZE, 2))
        """On the first axis the block's id."""
        self.worker.register_kv_caches({LAYER: self.kv})

    def step(self) -> None:
        """One step of the engine, with what its worker reports."""
        output = self.lab.schedule()
        self.lab.update(output, **worker_report(self.connector, output))

    def prefill(self, name: str, transfer: str, tokens: list[int], **sampling: Any) -> Any:
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
        return self.lab.add(name, list(tokens), params, max_tokens=1, **sampling)

    def decode(self, name: str, transfer: str, tokens: list[int], prefill: Engine | RemotePrefill) -> Any:
        params = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": transfer,
            "remote_engine_id": prefill.engine_id,
            "remote_bootstrap_addr": prefill.bootstrap,
        }
        return self.lab.add(name, list(tokens), params)

    def reject(self, name: str, prefill: Engine | RemotePrefill, transfer: str | None = None) -> None:
        """As vLLM's API server has it done for a request that it rejects: it ends before it was scheduled."""
        self.decode(name, transfer or f"t-{name}", [1, 2, 3], prefill)
        self.lab.abort(name)

    def open_pulls(self) -> int:
        """Upstream's tasks that wait for an answer of prefill."""
        pull = "receive_kv_from_single_worker"
        tasks = asyncio.all_tasks(self.worker.receiver_loop)
        return sum(1 for task in tasks if getattr(task.get_coro(), "__qualname__", "").endswith(pull))

    @property
    def engine_id(self) -> str:
        return str(self.worker.engine_id)

    @property
    def bootstrap(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def side_channel(self) -> str:
        return f"tcp://127.0.0.1:{self.worker.side_channel_port}"


def impatient(decode: Engine, milliseconds: int = 300) -> Engine:
    """It waits no longer than that for prefill's answer. Upstream derives its time from prefill's abort timeout."""

    class Socket(zmq.asyncio.Socket):
        def setsockopt(self, option: int, value: Any) -> None:
            super().setsockopt(option, milliseconds if option == zmq.RCVTIMEO else value)

    class Context(zmq.asyncio.Context):
        _socket_class = Socket

    decode.worker.async_zmq_ctx = Context()
    return decode


class RemotePrefill:
    """A prefill engine in a process of its own, that steps by itself."""

    def __init__(self, process: Any, pipe: Any) -> None:
        self._process = process
        self._pipe = pipe
        pipe.send(os.environ[ABORT_TIMEOUT])
        assert pipe.poll(60), "a prefill in a process of its own did not come up"
        self.engine_id, self.bootstrap = pipe.recv()

    def prefill(self, name: str, transfer: str, tokens: list[int]) -> None:
        self._pipe.send((name, transfer, tokens))

    def stop(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def prepare_remote_prefills(number: int) -> None:
    """Forks processes that wait to become one: while this process has one thread, and everything imported."""
    context = multiprocessing.get_context("fork")
    for _ in range(number):
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(there,), daemon=True)
        process.start()
        _prepared.append((process, here))


@contextmanager
def remote_prefill() -> Iterator[RemotePrefill]:
    """Without the patches of this project, except for the one that lets it start on a CPU."""
    prefill = RemotePrefill(*_prepared.pop())
    try:
        yield prefill
    finally:
        prefill.kill()


def _serve(pipe: Any) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ[ABORT_TIMEOUT] = pipe.recv()
    cpu_device.apply()
    engine = Engine("kv_producer")
    pipe.send((engine.engine_id, engine.bootstrap))
    while True:
        if pipe.poll(0.005):
            engine.prefill(*pipe.recv())
        engine.step()


def cut(port: int) -> None:
    """Break the connections of this process to that port; whoever listens there goes on."""
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError), socket.socket(fileno=os.dup(int(file.name))) as sock:
            if sock.family == socket.AF_INET and sock.getpeername()[1] == port:
                sock.shutdown(socket.SHUT_RDWR)


def until(holds: Callable[[], Any], *engines: Engine, seconds: float = 20.0) -> bool:
    """Steps the engines until something holds. False: it did not in that time."""
    ends = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > ends:
            return False
        for engine in engines:
            engine.step()
        time.sleep(0.005)
    return True


def at_once(holds: Callable[[], Any], *engines: Engine) -> bool:
    """Whether it needs no timeout: it is over before the abort timeout, or one of the patches, can have done anything.
    With the patches a fraction of a second is what it takes; the rest is for a busy machine."""
    return until(holds, *engines, seconds=int(os.environ[ABORT_TIMEOUT]) / 2)


def rest(*engines: Engine, seconds: float) -> None:
    """Lets them step for so long."""
    until(lambda: False, *engines, seconds=seconds)


def prompt(blocks: int = 2) -> list[int]:
    return [next(_tokens) for _ in range(BLOCK_SIZE * blocks)]


def arrived(decode: Engine, name: str) -> Callable[[], bool]:
    return lambda: decode.lab.status(name) == "RUNNING"


def gone(engine: Engine, name: str) -> Callable[[], bool]:
    return lambda: engine.lab.get(name) is None


def all_free(*engines: Engine) -> Callable[[], bool]:
    return lambda: all(engine.lab.free_blocks == BLOCKS - 1 for engine in engines)


def slowed(prefill: Engine) -> tuple[threading.Event, threading.Event]:
    """Its writes: when one has begun, and what it then waits for."""
    begun, go_on = threading.Event(), threading.Event()
    write = prefill.worker._send_blocks

    def slowly(*args: Any) -> int:
        begun.set()
        go_on.wait(60)
        return int(write(*args))

    prefill.worker._send_blocks = slowly
    return begun, go_on


def without_and_with(*scenarios: Callable[[bool], None], counted: Collection[str], together: int = 1) -> None:
    """Run every scenario without the patches, then with them, which is what it is told: so many `together`. `counted`:
    what they count then."""
    cpu_device.apply()
    assert {verdict(patch) for patch in PATCHES} == {"apply"}
    bootstrap._PATIENCE_SECONDS = 0.5
    pulls._LOOK_SECONDS = 0.2
    # Nothing may work only because of it: longer than `at_once`.
    withdrawals._IDLE_SECONDS = 120.0
    # Without the patches most of them only wait, so they wait together. With them few do, and they are timed.
    _run(scenarios, False, len(scenarios))
    for patch in PATCHES:
        patch.apply()
    os.environ[ABORT_TIMEOUT] = str(PATCHED_ABORT_SECONDS)
    _run(scenarios, True, together)
    seen = {effect for (_, effect), value in effects.totals().items() if value}
    declared = {effect for patch in PATCHES for effect in patch.effects}
    assert seen <= declared
    assert set(counted) - seen == set()


def _run(scenarios: Sequence[Callable[[bool], None]], patched: bool, number: int) -> None:
    """Run so many at a time."""
    with ThreadPoolExecutor(number) as pool:
        done = [(scenario, pool.submit(scenario, patched)) for scenario in scenarios]
    all_hold(*(functools.wraps(scenario)(lambda end=end: end.result()) for scenario, end in done))
