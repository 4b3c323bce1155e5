"""A program of its own, run by the engines' interpreter: one end of a transfer by Mooncake's TransferEngine or by NIXL,
in the memory that an engine there has its KV in. It needs no pdserve there: its source is its command line.

stdin: one line of JSON, the order. stdout: one line of JSON, the answer, or `{"step": ..., "error": ...}`. The waiting
end then keeps its memory until its stdin closes.
"""

from __future__ import annotations

import base64
import ctypes
import importlib
import json
import os
import resource
import signal
import sys
import time
import uuid
from collections.abc import Mapping
from typing import Any, Protocol

_SIZES = tuple(4096 << shift for shift in range(0, 15, 2))  # 4 KiB to 64 MiB
_PATTERN = 251  # a prime, so that no page repeats another one
_ENOUGH_SECONDS = 0.2
_POLL_SECONDS = 0.0002


class _FailedError(Exception):
    """A step that failed, with what the engine returned."""


class _HostMemory:
    def __init__(self, size: int) -> None:
        self._buffer = ctypes.create_string_buffer(size)
        self.address = ctypes.addressof(self._buffer)
        self.kind, self.text = "DRAM", "host memory"  # the first are NIXL's words

    def write(self, offset: int, data: bytes) -> None:
        ctypes.memmove(self.address + offset, data, len(data))

    def read(self, offset: int, size: int) -> bytes:
        return ctypes.string_at(self.address + offset, size)


class _DeviceMemory:
    """Memory of the first device that the engine sees. torch calls those of ROCm cuda too."""

    def __init__(self, size: int) -> None:
        try:
            self._torch = importlib.import_module("torch")
            self._tensor = self._torch.empty(size, dtype=self._torch.uint8, device="cuda:0")
        except (ImportError, RuntimeError, AssertionError) as error:
            raise _FailedError("device", f"{type(error).__name__}: {error}".splitlines()[0]) from None
        self.address = self._tensor.data_ptr()
        self.kind, self.text = "VRAM", "device memory"

    def write(self, offset: int, data: bytes) -> None:
        source = self._torch.frombuffer(bytearray(data), dtype=self._torch.uint8)
        self._tensor[offset : offset + len(data)].copy_(source)
        self._torch.cuda.synchronize()

    def read(self, offset: int, size: int) -> bytes:
        return bytes(self._tensor[offset : offset + size].cpu().tolist())


_Memory = _HostMemory | _DeviceMemory


class _Engine(Protocol):
    def where(self) -> dict[str, Any]:
        """Return what the other end needs to know."""
        ...

    def meet(self, peer: Mapping[str, Any]) -> None:
        """Meet the other end, by its `where`."""
        ...

    def move(self, offset: int, size: int, *, reads: bool) -> None:
        """Read from the other end, or write to it."""
        ...


class _Mooncake:
    def __init__(self, order: Mapping[str, Any], memory: _Memory) -> None:
        engine = _module("mooncake.engine").TransferEngine()
        if code := engine.initialize(order["host"], "P2PHANDSHAKE", order["protocol"], order["devices"]):
            raise _FailedError("initialize", f"TransferEngine.initialize returned {code}")
        if code := engine.batch_register_memory([memory.address], [_SIZES[-1]]):
            raise _FailedError("register", f"registering {_SIZES[-1] >> 20} MiB of {memory.text} returned {code}")
        self._engine, self._memory = engine, memory

    def where(self) -> dict[str, Any]:
        return {"session_port": self._engine.get_rpc_port()}

    def meet(self, peer: Mapping[str, Any]) -> None:
        self._session, self._far = f"{peer['address']}:{peer['session_port']}", peer["pointer"]

    def move(self, offset: int, size: int, *, reads: bool) -> None:
        move = self._engine.batch_transfer_sync_read if reads else self._engine.batch_transfer_sync_write
        if code := move(self._session, [self._memory.address + offset], [self._far + offset], [size]):
            raise _FailedError("transfer", f"{'reading' if reads else 'writing'} {size >> 10} KiB returned {code}")


class _Nixl:
    def __init__(self, order: Mapping[str, Any], memory: _Memory) -> None:
        # As vLLM chooses its package (vllm/distributed/nixl_utils.py of 0.32).
        nixl = _module("nixl_rocm._api" if order["platform"] == "rocm" else "nixl._api")
        self._memory = memory
        with _Step("initialize"):
            self._agent = nixl.nixl_agent(f"fabric-{uuid.uuid4()}", nixl.nixl_agent_config(backends=["UCX"]))
        with _Step("register"):
            described = self._agent.get_reg_descs([(memory.address, _SIZES[-1], 0, "")], memory.kind)
            self._agent.register_memory(described)

    def where(self) -> dict[str, Any]:
        return {"session_port": 0, "metadata": base64.b64encode(self._agent.get_agent_metadata()).decode()}

    def meet(self, peer: Mapping[str, Any]) -> None:
        self._far = peer["pointer"], peer["kind"]
        with _Step("transfer"):
            self._name = self._agent.add_remote_agent(base64.b64decode(peer["metadata"]))

    def move(self, offset: int, size: int, *, reads: bool) -> None:
        with _Step("transfer"):
            here, far = (
                self._agent.get_xfer_descs([(address + offset, size, 0)], kind)
                for address, kind in ((self._memory.address, self._memory.kind), self._far)
            )
            handle = self._agent.initialize_xfer("READ" if reads else "WRITE", here, far, self._name, b"")
            state = self._agent.transfer(handle)
            while state == "PROC":
                time.sleep(_POLL_SECONDS)
                state = self._agent.check_xfer_state(handle)
            if state != "DONE":
                raise _FailedError("transfer", f"{'reading' if reads else 'writing'} {size >> 10} KiB ended {state}")
            self._agent.release_xfer_handle(handle)


class _Step:
    """Names a step of NIXL: what it raises has no class in common, all of it is a failure of this step."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, _FailedError):
            raise _FailedError(self._name, f"{type(error).__name__}: {error}".splitlines()[0]) from None


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise _FailedError("import", str(error)) from None


def main() -> None:
    """Run one end. Whatever the engine prints goes to stderr; stdout has the answer alone."""
    sys.path[:] = [folder for folder in sys.path if folder]  # `-c` puts the current folder first
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    order = json.loads(sys.stdin.readline())
    try:
        answer = _call(order) if "peer" in order else _wait(order)
    except _FailedError as error:
        step, text = error.args
        answer = {"step": step, "error": text, "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]}
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
    if "peer" not in order:
        sys.stdin.read()
    os._exit(0)  # threads of the engine would outlive the interpreter


def _start(order: Mapping[str, Any]) -> tuple[_Engine, _Memory]:
    """Return the engine, and its registered memory."""
    memory: _Memory = _DeviceMemory(_SIZES[-1]) if order["on_device"] else _HostMemory(_SIZES[-1])
    return (_Nixl(order, memory) if order["engine"] == "nixl" else _Mooncake(order, memory)), memory


def _page() -> bytes:
    return bytes(index % _PATTERN for index in range(_SIZES[0]))


_kept: list[object] = []
"""The waiting end's engine and memory, for as long as the program lives."""


def _wait(order: Mapping[str, Any]) -> dict[str, Any]:
    engine, memory = _start(order)
    _kept.extend((engine, memory))
    if order["reads"]:  # by the other end
        memory.write(0, _page() * (_SIZES[-1] // _SIZES[0]))
    return {"pointer": memory.address, "kind": memory.kind, **engine.where()}


def _call(order: Mapping[str, Any]) -> dict[str, Any]:
    """Read or write more and more until it lasts long enough to be measured. The last page of what was written is read
    back; then the page is compared.

    SIGALRM ends the program when they take longer than `seconds` of the order. The start before them, which may read
    the engine from a cold and distant disk, does not count."""
    engine, memory = _start(order)
    signal.alarm(order["seconds"])
    page, reads = _page(), order["reads"]
    if not reads:
        memory.write(0, page * (_SIZES[-1] // len(page)))
    engine.meet(order["peer"])
    timings: list[tuple[int, float]] = []
    for size in _SIZES:
        began = time.monotonic()
        engine.move(0, size, reads=reads)
        timings.append((size, time.monotonic() - began))
        if timings[-1][1] >= _ENOUGH_SECONDS:
            break
    last = timings[-1][0] - len(page)
    if not reads:
        memory.write(last, bytes(len(page)))
        engine.move(last, len(page), reads=True)
    if memory.read(last, len(page)) != page:
        raise _FailedError("compare", "the bytes that were read are not those that were written")
    return {"timings": timings}


if __name__ == "__main__":
    main()
