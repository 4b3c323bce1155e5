"""What Mooncake has reported as written is there (vllm#44238, over TCP): its own transfer engine between two processes.

Of 0.3.11.post1 the same test says that a write to a stopped receiver is done at once.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from typing import Any

import pytest

from tests.upstream.run import INSTALLED_VLLM, on

PIECES = (*[2_424_832] * 4, *[16_384] * 4)
"""As in vllm#44238."""
SIZE = sum(PIECES)
NOT_YET_SECONDS = 1.0
"""For so long a write to a stopped receiver must not be done."""
WITHIN_SECONDS = 60.0


def registered(content: bytes) -> tuple[Any, Any]:
    """An engine of this process, and memory that is registered with it."""
    from mooncake.engine import TransferEngine

    engine: Any = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    memory = ctypes.create_string_buffer(content, SIZE)
    assert engine.register_memory(ctypes.addressof(memory), SIZE) == 0
    return engine, memory


def receive(pipe: Any) -> None:
    """Be the other process, which tells once what it has."""
    engine, memory = registered(b"")
    pipe.send((f"127.0.0.1:{engine.get_rpc_port()}", ctypes.addressof(memory)))
    pipe.recv()
    pipe.send_bytes(bytes(memory))


@on(INSTALLED_VLLM)
def test_a_write_is_done_when_the_receiver_has_it() -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    receiver = context.Process(target=receive, args=(there,), daemon=True)
    receiver.start()
    engine, memory = registered(content := os.urandom(SIZE))
    session, address = here.recv()
    starts = [sum(PIECES[:index]) for index in range(len(PIECES))]
    local, remote = ([start + offset for offset in starts] for start in (ctypes.addressof(memory), address))
    assert receiver.pid is not None
    try:
        with ThreadPoolExecutor(1) as pool:
            os.kill(receiver.pid, signal.SIGSTOP)
            # One request's blocks, as vLLM's prefill sends them.
            sent = pool.submit(engine.batch_transfer_sync_write, session, local, remote, list(PIECES))
            with pytest.raises(NotYet):
                sent.result(NOT_YET_SECONDS)
            os.kill(receiver.pid, signal.SIGCONT)
            assert sent.result(WITHIN_SECONDS) == 0
        here.send("written")
        assert here.recv_bytes() == content
    finally:
        receiver.kill()
        receiver.join()
