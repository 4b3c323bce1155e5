"""A program of its own, run by the engines' interpreter: one end of a transfer by Mooncake's TransferEngine, in host
memory. It needs no pdserve there: its source is its command line.

stdin: one line of JSON, the order. stdout: one line of JSON, the answer, or `{"step": ..., "error": ...}`. The
receiving end then keeps its memory until its stdin closes.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

_SIZES = tuple(4096 << shift for shift in range(0, 15, 2))  # 4 KiB to 64 MiB
_PATTERN = 251  # a prime, so that no page repeats another one
_ENOUGH_SECONDS = 0.2


class _FailedError(Exception):
    """A step that failed, with what the engine returned."""


def main() -> None:
    """Entry. Whatever the engine prints goes to stderr; stdout has the answer alone."""
    sys.path[:] = [folder for folder in sys.path if folder]  # `-c` puts the current folder first
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    order = json.loads(sys.stdin.readline())
    try:
        answer = _send(order) if "pointer" in order else _receive(order)
    except _FailedError as error:
        step, text = error.args
        answer = {"step": step, "error": text, "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]}
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
    if "pointer" not in order:
        sys.stdin.read()
    os._exit(0)  # threads of the engine would outlive the interpreter


def _start(order: Mapping[str, Any]) -> tuple[Any, ctypes.Array[ctypes.c_char], int]:
    """The engine, its registered memory and the address of that."""
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise _FailedError("import", str(error)) from None
    engine = TransferEngine()
    if code := engine.initialize(order["host"], "P2PHANDSHAKE", order["protocol"], order["devices"]):
        raise _FailedError("initialize", f"TransferEngine.initialize returned {code}")
    memory = ctypes.create_string_buffer(_SIZES[-1])
    address = ctypes.addressof(memory)
    if code := engine.batch_register_memory([address], [len(memory)]):
        raise _FailedError("register", f"registering {len(memory) >> 20} MiB of host memory returned {code}")
    return engine, memory, address


_kept: list[object] = []
"""The receiving end's engine and memory, for as long as the program lives."""


def _receive(order: Mapping[str, Any]) -> dict[str, Any]:
    engine, memory, address = _start(order)
    _kept.extend((engine, memory))
    return {"session_port": engine.get_rpc_port(), "pointer": address}


def _send(order: Mapping[str, Any]) -> dict[str, Any]:
    """Growing writes until one lasts long enough to be measured, then the last page is read back and compared.

    SIGALRM ends the program when they take longer than `seconds` of the order. The start before them, which may read
    the engine from a cold and distant disk, does not count."""
    engine, memory, address = _start(order)
    signal.alarm(order["seconds"])
    page = bytes(index % _PATTERN for index in range(_SIZES[0]))
    ctypes.memmove(address, page * (len(memory) // len(page)), len(memory))
    timings: list[tuple[int, float]] = []
    for size in _SIZES:
        began = time.monotonic()
        if code := engine.batch_transfer_sync_write(order["session"], [address], [order["pointer"]], [size]):
            raise _FailedError("transfer", f"writing {size >> 10} KiB returned {code}")
        timings.append((size, time.monotonic() - began))
        if timings[-1][1] >= _ENOUGH_SECONDS:
            break
    last = timings[-1][0] - len(page)
    ctypes.memset(address + last, 0, len(page))
    if code := engine.batch_transfer_sync_read(
        order["session"], [address + last], [order["pointer"] + last], [len(page)]
    ):
        raise _FailedError("transfer", f"reading back {len(page) >> 10} KiB returned {code}")
    if ctypes.string_at(address + last, len(page)) != page:
        raise _FailedError("compare", "the bytes that were read back are not those that were written")
    return {"timings": timings}


if __name__ == "__main__":
    main()
