"""Runs probes in forks of a process that has imported one version of vLLM: the import is most of what a probe costs.

`python -m tests.upstream.preloaded`: one JSON request a line on stdin, one JSON answer a line on stdout. A probe sees a
fresh fork, so what it patches or breaks ends with it. Ends when stdin does, and its forks end with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn
from unittest import mock

_IMPORTED = (
    "tests.upstream.scheduler_lab",
    "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector",
    "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector",
)
_PR_SET_PDEATHSIG = 1


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    # What the imports print is not an answer.
    os.dup2(2, 1)
    for module in _IMPORTED:
        # A probe that needs what cannot be imported here says so itself.
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    _inspect_the_model()
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become(request)
        _, status = os.waitpid(pid, 0)
        answers.write(json.dumps({"code": os.waitstatus_to_exitcode(status)}) + "\n")
        answers.flush()


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


def _become(request: dict[str, Any]) -> NoReturn:
    """The probe, with its output in a file. Never returns."""
    module, args = request["module"], request["args"]
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        out = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.argv = [module, *args]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as done:
        code = done.code if isinstance(done.code, int) else int(done.code is not None)
    except BaseException:  # noqa: BLE001  (the traceback is the answer)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
