"""Runs functions in forks of processes that have imported one version of vLLM each: the import is what takes time.

`python -m tests.upstream.preloaded`: the parent of them all, spoken to by run.py over stdin and stdout. With a version:
one of them. A function sees a fresh fork, so what it patches or breaks ends with it. They end when stdin does.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

_IMPORTED = (
    "tests.upstream.scheduler_lab",
    "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector",
    "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector",
    # Without LMCache's clients: patches take hold of them when vLLM imports them.
    "lmcache.v1.multiprocess.transfer_context.worker_transfer",
)
_PR_SET_PDEATHSIG = 1
_SHOWN = 2000
"""Characters of a local variable of a test that has failed."""


def be_parent() -> None:
    started: dict[str, subprocess.Popen[str]] = {}
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps({"code": _forwarded(order, started)}), flush=True)
    for popen in started.values():
        _end(popen)


def _forwarded(order: dict[str, Any], started: dict[str, subprocess.Popen[str]]) -> int | None:
    """The exit code of the fork; None when it was late or its process died."""
    version = order["version"]
    if version not in started:
        started[version] = subprocess.Popen(
            [sys.executable, "-m", "tests.upstream.preloaded", version],
            env=order["environment"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    popen = started[version]
    assert popen.stdin is not None
    assert popen.stdout is not None
    popen.stdin.write(json.dumps(order) + "\n")
    popen.stdin.flush()
    ready, _, _ = select.select([popen.stdout], [], [], order["timeout"])
    answer = popen.stdout.readline() if ready else ""
    if not answer:
        _end(started.pop(version))
        return None
    code: int = json.loads(answer)
    return code


def _end(popen: subprocess.Popen[str]) -> None:
    popen.kill()
    popen.wait()


def be_release() -> None:
    answers = os.fdopen(os.dup(1), "w")
    # What the imports print is not an answer.
    os.dup2(2, 1)
    for module in _IMPORTED:
        # A function that needs what cannot be imported here says so itself.
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    _inspect_the_model()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _become(json.loads(line))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def _inspect_the_model() -> None:
    """vLLM does it in a subprocess that imports vLLM once more; here in a fork. The lab keeps the answer."""
    config = sys.modules.get("tests.upstream.engine_config")
    if config is not None:
        registry = importlib.import_module("vllm.model_executor.models.registry")
        with mock.patch.object(registry, "_run_in_subprocess", _in_a_fork):
            config.tiny_model()


def _in_a_fork(question: Callable[[], Any]) -> Any:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=lambda: there.send(question()))
    process.start()
    there.close()
    answer = here.recv()
    process.join()
    return answer


def _become(order: dict[str, Any]) -> NoReturn:
    """Run what was ordered, with its output and its result in files of a folder."""
    module, function, arguments, code = order["module"], order["function"], order["arguments"], 1
    folder = Path(order["folder"])
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        out = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        called = getattr(importlib.import_module(module), function)
        result = getattr(called, "__wrapped__", called)(**arguments)
        (folder / "result").write_text(json.dumps(result))
        code = 0
    except SystemExit as done:
        code = done.code if isinstance(done.code, int) else int(done.code is not None)
    except BaseException as error:  # noqa: BLE001  (the traceback is the answer)
        traceback.print_exc()
        _show_locals(error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _show_locals(error: BaseException) -> None:
    """Of the tests' innermost function: what an assertion was about."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            _show_locals(each)
        return
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if "/tests/" in frame.f_code.co_filename]
    for name, value in frames[-1].f_locals.items() if frames else ():
        print(f"  {name} = {repr(value)[:_SHOWN]}", file=sys.stderr)


if __name__ == "__main__":
    be_release() if sys.argv[1:] else be_parent()
