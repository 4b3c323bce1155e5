"""Runs probes in forks of a process that has imported one version of vLLM: the import is most of what a probe costs.

`python -m tests.upstream.preloaded`: one JSON request a line on stdin, one JSON answer a line on stdout. A probe sees a
fresh fork, so what it patches or breaks ends with it. Ends when stdin does, and its forks end with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

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
            _become(request["module"], request["args"], Path(request["said"]))
        _, status = os.waitpid(pid, 0)
        answers.write(json.dumps({"code": os.waitstatus_to_exitcode(status)}) + "\n")
        answers.flush()


def _inspect_the_model() -> None:
    """vLLM does it in a subprocess that imports vLLM once more; the lab keeps the answer."""
    config = sys.modules.get("tests.upstream.engine_config")
    if config is not None:
        config.tiny_model()


def _become(module: str, args: Sequence[str], said: Path) -> NoReturn:
    """The probe, with its output in a file. Never returns."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
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
