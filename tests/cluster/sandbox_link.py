"""The test process's end of a sandbox: starts it below a keeper, gives orders, ends it."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from pdserve.system import procfs
from tests.cluster.errors import LabError
from tests.cluster.spec import Spec

_ROOT = Path(__file__).resolve().parents[2]
_ANSWER_SECONDS, _DOWN_SECONDS = 120.0, 180.0


class SandboxLink:
    """Raises LabError when an order fails; the claim on the prefix passes to the keeper."""

    def __init__(self, spec: Spec, claim: socket.socket) -> None:
        self._spec = spec
        self._one = threading.Lock()
        self._log = spec.log / "sandbox.log"
        with self._log.open("w") as log, claim:
            self._keeper = subprocess.Popen(
                [sys.executable, "-S", "-m", "tests.cluster.keeper", str(os.getpid()), str(spec.folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=_ROOT,
                env={"PATH": f"/usr/sbin:/sbin:{os.environ['PATH']}", "PYTHONPATH": str(_ROOT), "LANG": "C.UTF-8"},
                pass_fds=[claim.fileno()],
                start_new_session=True,
            )
        self._answer("start")

    @property
    def keeper(self) -> int:
        return self._keeper.pid

    def order(self, verb: str, node: str) -> Any:
        assert self._keeper.stdin is not None
        with self._one:
            try:
                self._keeper.stdin.write(json.dumps([verb, node]).encode() + b"\n")
                self._keeper.stdin.flush()
            except BrokenPipeError:
                raise self._ended(f"{verb} {node}") from None
            return self._answer(f"{verb} {node}")

    def _answer(self, order: str) -> Any:
        assert self._keeper.stdout is not None
        ready, _, _ = select.select([self._keeper.stdout], [], [], _ANSWER_SECONDS)
        if not ready:
            raise LabError(f"{order}: no answer from the sandbox within {_ANSWER_SECONDS:.0f} s; see {self._log}")
        line = self._keeper.stdout.readline()
        if not line:
            raise self._ended(order)
        answer = json.loads(line)
        if answer["error"]:
            raise LabError(answer["error"])
        return answer["value"]

    def _ended(self, order: str) -> LabError:
        self._end()
        return LabError(f"{order}: the sandbox has ended:\n{self._log.read_text().strip()}")

    def host_pid(self, inner: int) -> int:
        """The PID that a node's first process, `inner` to the sandbox, has in the test process's eyes."""
        for pid in procfs.descendants(self.keeper):
            numbers = namespace_pids(pid)
            # In the machine's, the sandbox's and its own namespace.
            if numbers[-2:] == [inner, 1]:
                return pid
        raise LabError(f"the first process of a node, {inner} in the sandbox, has ended; see {self._spec.log}")

    def close(self) -> None:
        """Ends everything in the sandbox and returns when it is gone."""
        if code := self._end():
            raise LabError(f"the sandbox's keeper ended with {code}:\n{self._log.read_text().strip()}")

    def _end(self) -> int:
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        self._keeper.stdin.close()
        self._keeper.stdout.close()
        try:
            return self._keeper.wait(_DOWN_SECONDS)
        except subprocess.TimeoutExpired:
            self._keeper.kill()  # the sandbox dies with it
            return self._keeper.wait()


def namespace_pids(pid: int) -> list[int]:
    """A process's PID in each namespace from the reader's inwards; empty when it has ended."""
    try:
        lines = Path("/proc", str(pid), "status").read_text().splitlines()
    except OSError:
        return []
    return [int(word) for line in lines if line.startswith("NSpid:") for word in line.split()[1:]]
