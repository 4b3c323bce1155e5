"""Runs functions in forks of processes that have imported one version of vLLM each: the import is what takes time.

`python -m tests.upstream.preloaded FD`: the parent of them all, spoken to by run.py over a connection. A function sees
a fresh fork, so what it patches or breaks ends with it. Each process ends with the one that has made it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any

_IMPORTED = (
    "tests.upstream.scheduler_lab",
    "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector",
    "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector",
    # Without LMCache's clients: patches take hold of them when vLLM imports them.
    "lmcache.v1.multiprocess.transfer_context.worker_transfer",
)
_PR_SET_PDEATHSIG = 1
_FORK = multiprocessing.get_context("fork")


def be_parent(orders: Connection) -> None:
    """Answer each order, to run a function, with whether it has succeeded; None: it was late, or its process died."""
    started: dict[str, tuple[ForkProcess, Connection]] = {}
    with contextlib.suppress(EOFError):
        while True:
            version, environment, timeout, *call = orders.recv()
            if version not in started:
                started[version] = _forked(_be_release, environment)
            process, pipe = started[version]
            pipe.send(call)
            succeeded = _answer(pipe, timeout)
            if succeeded is None:
                process.kill()
                del started[version]
            orders.send(succeeded)
    os._exit(0)  # the others end with it


def _answer(pipe: Connection, timeout: float | None = None) -> bool | None:
    with contextlib.suppress(EOFError):
        if pipe.poll(timeout):
            return bool(pipe.recv())
    return None


def _forked(function: Callable[..., None], *arguments: Any) -> tuple[ForkProcess, Connection]:
    """A process that runs it with a connection to this one, and ends with this one."""
    here, there = _FORK.Pipe()

    def run() -> None:
        here.close()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        function(there, *arguments)

    process = _FORK.Process(target=run)
    process.start()
    there.close()
    return process, here


def _be_release(orders: Connection, environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    for module in _IMPORTED:
        # A function that needs what cannot be imported here says so itself.
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    while True:
        process, pipe = _forked(_run, *orders.recv())
        succeeded = _answer(pipe)
        process.kill()  # whatever threads it has
        process.join()
        orders.send(bool(succeeded))


def _run(answers: Connection, module: str, function: str, arguments: Mapping[str, Any], output: str) -> None:
    """What it prints, or dies of, goes to the file."""
    out = os.open(output, os.O_WRONLY)
    os.dup2(out, 1)
    os.dup2(out, 2)
    succeeded = False
    try:
        called = getattr(importlib.import_module(module), function)
        getattr(called, "__wrapped__", called)(**arguments)
        succeeded = True
    except BaseException as error:  # noqa: BLE001  (the traceback is the answer)
        shown = traceback.TracebackException.from_exception(error, capture_locals=True)
        print(*shown.format(), sep="", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    answers.send(succeeded)


if __name__ == "__main__":
    be_parent(Connection(int(sys.argv[1])))
