"""What Mooncake has reported as written is there (vllm#44238, over TCP): its own transfer engine between two processes.

Of 0.3.11.post1 the same test says: a write to a stopped receiver is done at once, and of 32 transfers one had other
bytes when it was reported as done.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from typing import Any

import pytest

from tests.upstream.run import INSTALLED_VLLM, on

PIECES = (*[2_424_832] * 4, *[16_384] * 4)
"""As in vllm#44238."""
SLOT = sum(PIECES)
SLOTS, ROUNDS = 8, 4
NOT_YET_SECONDS = 1.0
"""For so long a write to a stopped receiver must not be done."""
WITHIN_SECONDS = 60.0


class Memory:
    """Slots that are registered with an engine of this process."""

    def __init__(self) -> None:
        from mooncake.engine import TransferEngine

        self.engine: Any = TransferEngine()
        assert self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        self.buffer = ctypes.create_string_buffer(SLOT * SLOTS)
        self.address = ctypes.addressof(self.buffer)
        assert self.engine.register_memory(self.address, SLOT * SLOTS) == 0

    def slot(self, number: int) -> bytes:
        return bytes(memoryview(self.buffer)[number * SLOT : (number + 1) * SLOT])


def receive(pipe: Any) -> None:
    """Be the other process, which tells whether a slot has these bytes until it is asked for none."""
    memory = Memory()
    pipe.send((f"127.0.0.1:{memory.engine.get_rpc_port()}", memory.address))
    while (number := pipe.recv()) is not None:
        pipe.send(memory.slot(number) == pipe.recv_bytes())


@on(INSTALLED_VLLM)
def test_a_write_is_done_when_the_receiver_has_it() -> None:
    """Of many transfers at once each has its bytes in place as soon as it is reported as done. One to a stopped
    receiver is not done meanwhile."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    receiver = context.Process(target=receive, args=(there,), daemon=True)
    receiver.start()
    memory, one_question = Memory(), threading.Lock()
    session, address = here.recv()

    def send(slot: int) -> int:
        """One request's blocks, as vLLM's prefill sends them. The library's answer: 0 is good."""
        offsets = [slot * SLOT + sum(PIECES[:index]) for index in range(len(PIECES))]
        local, remote = ([start + offset for offset in offsets] for start in (memory.address, address))
        return int(memory.engine.batch_transfer_sync_write(session, local, remote, list(PIECES)))

    def write_slot(slot: int) -> None:
        for _ in range(ROUNDS):
            ctypes.memmove(memory.address + slot * SLOT, os.urandom(1024) * (SLOT // 1024), SLOT)
            assert send(slot) == 0
            with one_question:
                here.send(slot)
                here.send_bytes(memory.slot(slot))
                assert here.recv()

    assert receiver.pid is not None
    try:
        with ThreadPoolExecutor(SLOTS) as pool:
            list(pool.map(write_slot, range(SLOTS)))
            os.kill(receiver.pid, signal.SIGSTOP)
            sent = pool.submit(send, 0)
            with pytest.raises(NotYet):
                sent.result(NOT_YET_SECONDS)
            os.kill(receiver.pid, signal.SIGCONT)
            assert sent.result(WITHIN_SECONDS) == 0
    finally:
        receiver.kill()
        receiver.join()
