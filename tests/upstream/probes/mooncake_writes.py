"""Whether what Mooncake has reported as written is there: its own transfer engine, over TCP, between two processes.

Many transfers at once, of the sizes of vllm#44238: four large pieces and four small ones each. And one to a receiver
that is stopped. `python -m ... receive`: the other process.
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

MODULE = "tests.upstream.probes.mooncake_writes"
PIECES = (*[2_424_832] * 4, *[16_384] * 4)
SLOT = sum(PIECES)
SLOTS = 8
ROUNDS = 4
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
            [sys.executable, "-m", MODULE, "receive"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._one_question = threading.Lock()
        about = self._answer()
        self.session, self.address = about["session"], about["address"]

    def digest(self, slot: int) -> str:
        with self._one_question:
            assert self._process.stdin is not None
            print(slot, file=self._process.stdin, flush=True)
            answer: str = self._answer()
        return answer

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def _answer(self) -> Any:
        """The next line that is ours: the library writes lines of its own."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        raise AssertionError(f"the receiver has ended: {self._process.wait()}")

    def close(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(WITHIN_SECONDS)


def receive() -> None:
    memory = Memory()
    session = f"127.0.0.1:{memory.engine.get_rpc_port()}"
    print("ANSWER " + json.dumps({"session": session, "address": memory.address}), flush=True)
    for line in sys.stdin:
        print("ANSWER " + json.dumps(memory.digest(int(line))), flush=True)


def send(memory: Memory, receiver: Receiver, slot: int) -> int:
    """One request's blocks, as vLLM's prefill sends them. The library's answer: 0 is good."""
    offsets = [slot * SLOT + sum(PIECES[:index]) for index in range(len(PIECES))]
    answer: int = memory.engine.batch_transfer_sync_write(
        receiver.session,
        [memory.address + offset for offset in offsets],
        [receiver.address + offset for offset in offsets],
        list(PIECES),
    )
    return answer


def at_once(memory: Memory, receiver: Receiver) -> dict[str, int]:
    """Each slot is filled anew, sent, and looked at as soon as its transfer is reported as done; all slots at once."""

    def write_slot(slot: int) -> list[str]:
        ends, start = [], slot * SLOT
        for _ in range(ROUNDS):
            ctypes.memmove(memory.address + start, os.urandom(1024) * (SLOT // 1024), SLOT)
            if send(memory, receiver, slot) != 0:
                ends.append("failed")
            else:
                ends.append("same" if receiver.digest(slot) == memory.digest(slot) else "other")
        return ends

    with ThreadPoolExecutor(SLOTS) as pool:
        ends = [end for slot in pool.map(write_slot, range(SLOTS)) for end in slot]
    return {end: ends.count(end) for end in ("same", "other", "failed")}


def to_a_stopped_receiver(memory: Memory, receiver: Receiver) -> dict[str, bool]:
    receiver.signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send, memory, receiver, 0)
        try:
            sent.result(NOT_YET_SECONDS)
            early = True
        except NotYet:
            early = False
        receiver.signal(signal.SIGCONT)
        done = sent.result(WITHIN_SECONDS) == 0
    return {"done_while_it_is_stopped": early, "done_after_it": done}


def main() -> None:
    memory, receiver = Memory(), Receiver()
    try:
        results = {"at_once": at_once(memory, receiver), "stopped": to_a_stopped_receiver(memory, receiver)}
    finally:
        receiver.close()
    print(json.dumps(results))


if __name__ == "__main__":
    receive() if sys.argv[1:] == ["receive"] else main()
