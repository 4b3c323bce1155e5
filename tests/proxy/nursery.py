"""Proxies and fake engines that start in milliseconds: forks of a process that has imported what they need.

Each is what the same command line starts, but for that. The tests of the start itself, and every program that a rolling
restart executes, are the real thing (`Proxy(fresh=True)`).
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import IO, Any, NoReturn

REPOSITORY = Path(__file__).parents[2]
PIPE_BYTES = 1 << 20
"""Most tests never read the log: a full pipe would stop the proxy in the middle of a module."""
PROXY = "import sys, pdserve.proxy\nsys.exit(pdserve.proxy.main())"
ENGINE = "import tests.fakes.engine_process\ntests.fakes.engine_process.main()"


class Nursery:
    """The parent of all that is forked."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        with theirs:
            command = [sys.executable, "-u", "-m", "tests.proxy.nursery", str(theirs.fileno())]
            environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
            self._process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, pass_fds=[theirs.fileno()])
        self.pid = self._process.pid

    def tell(self, order: dict[str, Any], descriptors: tuple[int, ...] = ()) -> int:
        with self._lock:
            socket.send_fds(self._channel, [json.dumps(order).encode()], descriptors)
            answer = self._channel.recv(64)
        assert answer, "the nursery has ended"
        return int(answer)

    def close(self) -> None:
        """What is still there ends with it."""
        self._channel.close()
        self._process.wait()


class Forked:
    """As much of subprocess.Popen as tests of the proxy need."""

    def __init__(self, nursery: Nursery, argv: list[str], env: dict[str, str], *, stdin: int | None) -> None:
        self._nursery = nursery
        self.returncode: int | None = None
        self.stdin: IO[str] | None = None
        out, theirs = os.pipe2(os.O_CLOEXEC)
        fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self.stdout: IO[str] | None = os.fdopen(out)  # which the test's Child closes
        if stdin == subprocess.PIPE:
            source, own = os.pipe2(os.O_CLOEXEC)
            self.stdin = os.fdopen(own, "w")
        else:
            source = os.open(os.devnull, os.O_RDONLY)
        try:
            self.pid = nursery.tell({"argv": argv, "env": env}, (source, theirs))
        finally:
            os.close(source)
            os.close(theirs)
        self._life = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return code

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._life, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._life], [], [], timeout)[0]:
            self.returncode = self._nursery.tell({"reap": self.pid})
            os.close(self._life)
        return self.returncode


def program(argv: list[str]) -> str | None:
    """The code that a command line runs, where that can be forked: not a proxy with other constants (`moments`), which
    other modules have imported by then."""
    if argv[1:3] == ["-m", "pdserve.proxy"]:
        return PROXY
    return ENGINE if argv[1] == "tests/fakes/engine.py" else None


def main() -> None:
    """Forks what it is told to; waits for those that have ended, whose exit code is then the answer."""
    for module in (
        "pdserve.proxy",
        "pdserve.pd.serve.gateway",
        "pdserve.pd.serve.member",
        "tests.fakes.engine_process",
    ):
        importlib.import_module(module)
    channel = socket.socket(fileno=int(sys.argv[1]))
    gc.collect()
    gc.freeze()
    children: set[int] = set()
    while True:
        data, descriptors, _, _ = socket.recv_fds(channel, 1 << 18, 2)
        if not data:
            break
        order = json.loads(data)
        if "reap" in order:
            children.discard(order["reap"])
            answer = os.waitstatus_to_exitcode(os.waitpid(order["reap"], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                channel.detach()
                _become(order["argv"], order["env"], *descriptors)
            children.add(answer)
            for descriptor in descriptors:
                os.close(descriptor)
        channel.send(str(answer).encode())
    for child in children:
        os.kill(child, signal.SIGKILL)


def _become(argv: list[str], env: dict[str, str], stdin: int, stdout: int) -> NoReturn:
    code: Any = 1
    try:
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        os.dup2(stdout, 2)
        os.closerange(3, 64)
        os.environ.clear()
        os.environ.update(env)
        sys.orig_argv[:] = argv
        sys.argv[:] = argv[1:] if argv[1].endswith(".py") else argv[2:]
        source = program(argv)
        assert source is not None
        exec(source, {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001  (as Python does at its end)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


if __name__ == "__main__":
    main()
