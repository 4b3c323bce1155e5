"""What Mooncake has reported as written is there (vllm#44238, over TCP): its own transfer engine between two processes.

`python -m tests.upstream.test_mooncake_writes`: the receiver.

Of 0.3.11.post1 the same test says: a write to a stopped receiver is done at once, and of 32 transfers one had other
bytes when it was reported as done.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import subprocess
import sys
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

    def digest(self, slot: int) -> str:
        """Of what a slot has."""
        return hashlib.sha256(memoryview(self.buffer)[slot * SLOT : (slot + 1) * SLOT]).hexdigest()


class Receiver:
    """The other process. Ends with its standard input."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.upstream.test_mooncake_writes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._one_question = threading.Lock()
        self.session, self.address = self._answer()
        self.signal = self._process.send_signal

    def digest(self, slot: int) -> str:
        with self._one_question:
            print(slot, file=self._process.stdin, flush=True)
            return str(self._answer())

    def _answer(self) -> Any:
        """The next line that is ours: the library writes lines of its own."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        raise AssertionError(f"the receiver has ended: {self._process.wait()}")

    def close(self) -> None:
        self.signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(WITHIN_SECONDS)


def receive() -> None:
    memory = Memory()
    print("ANSWER " + json.dumps([f"127.0.0.1:{memory.engine.get_rpc_port()}", memory.address]), flush=True)
    for line in sys.stdin:
        print("ANSWER " + json.dumps(memory.digest(int(line))), flush=True)


def send(memory: Memory, receiver: Receiver, slot: int) -> int:
    """One request's blocks, as vLLM's prefill sends them. The library's answer: 0 is good."""
    offsets = [slot * SLOT + sum(PIECES[:index]) for index in range(len(PIECES))]
    here, there = ([start + offset for offset in offsets] for start in (memory.address, receiver.address))
    return int(memory.engine.batch_transfer_sync_write(receiver.session, here, there, list(PIECES)))


@on(INSTALLED_VLLM)
def test_a_write_is_done_when_the_receiver_has_it() -> None:
    """Of many transfers at once each has its bytes in place as soon as it is reported as done. One to a stopped
    receiver is not done meanwhile."""
    memory, receiver = Memory(), Receiver()

    def write_slot(slot: int) -> None:
        for _ in range(ROUNDS):
            ctypes.memmove(memory.address + slot * SLOT, os.urandom(1024) * (SLOT // 1024), SLOT)
            assert send(memory, receiver, slot) == 0
            assert receiver.digest(slot) == memory.digest(slot)

    try:
        with ThreadPoolExecutor(SLOTS) as pool:
            list(pool.map(write_slot, range(SLOTS)))
            receiver.signal(signal.SIGSTOP)
            sent = pool.submit(send, memory, receiver, 0)
            with pytest.raises(NotYet):
                sent.result(NOT_YET_SECONDS)
            receiver.signal(signal.SIGCONT)
            assert sent.result(WITHIN_SECONDS) == 0
    finally:
        receiver.close()


if __name__ == "__main__":
    receive()
