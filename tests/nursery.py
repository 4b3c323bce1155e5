"""Programs that start in milliseconds: forks of a process that has imported what they need.

The proxy, fake engines, and the commands that users type. Each is what the same command line starts, but for that. The
tests of a start itself, what a command starts in turn, and every program that a rolling restart executes, are the real
thing.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import io
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

REPOSITORY = Path(__file__).parents[1]
PIPE_BYTES = 1 << 20
"""Most tests never read the log: a full pipe would stop the proxy in the middle of a module."""
PROXY = "import sys, pdserve.proxy\nsys.exit(pdserve.proxy.main())"
ENGINE = "import tests.fakes.engine_process\ntests.fakes.engine_process.main()"
COMMAND = "import pdserve.cli.main\npdserve.cli.main.main()"
_OF_TERMINALS = (signal.SIGINT, signal.SIGHUP)
"""What ignores them has children that ignore them."""
_READ_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "TERM", "COLUMNS", "NO_COLOR", "FORCE_COLOR", "TYPER", "_TYPER")
"""Beginnings of variables that an interpreter, or a module while it is imported, reads: a fork cannot have others."""


class Nursery:
    """The parent of all that is forked in one process of tests."""

    _shared: Nursery | None = None

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"}
        with theirs:
            command = [sys.executable, "-u", "-m", "tests.nursery", str(theirs.fileno())]
            self._process = subprocess.Popen(command, cwd=REPOSITORY, env=self._environment, pass_fds=[theirs.fileno()])
        self.pid = self._process.pid

    @classmethod
    def shared(cls) -> Nursery:
        """Return the one of this process, which is there from its first use on."""
        if cls._shared is None:
            cls._shared = cls()
        return cls._shared

    @classmethod
    def pids(cls) -> set[int]:
        """Return the process of the shared one, if it is there."""
        return set() if cls._shared is None else {cls._shared.pid}

    @classmethod
    def close_shared(cls) -> None:
        if cls._shared is not None:
            cls._shared.close()
            cls._shared = None

    def forks(self, argv: list[str], env: dict[str, str]) -> bool:
        """Return whether a command line with this environment can be forked."""
        if program(argv) is None:
            return False
        asked = {"PYTHONPATH": str(REPOSITORY), **env}
        names = {name for name in (*asked, *self._environment) if name.startswith(_READ_AT_START)}
        return all(asked.get(name) == self._environment.get(name) for name in names)

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
    """As much of subprocess.Popen as tests need. `session`: it begins one, as `start_new_session` does."""

    def __init__(
        self, nursery: Nursery, argv: list[str], env: dict[str, str], *, stdin: int | None, session: bool = False
    ) -> None:
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
            ignored = [int(signum) for signum in _OF_TERMINALS if signal.getsignal(signum) is signal.SIG_IGN]
            order = {"argv": argv, "env": env, "session": session, "ignored": ignored}
            self.pid = nursery.tell(order, (source, theirs))
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
    if argv[1:3] == ["-m", "pdserve.cli.main"]:
        return COMMAND
    return ENGINE if argv[1] == "tests/fakes/engine.py" else None


def main() -> None:
    """Forks what it is told to; waits for those that have ended, whose exit code is then the answer."""
    for module in (
        "pdserve.proxy",
        "pdserve.pd.serve.gateway",
        "pdserve.pd.serve.member",
        "pdserve.cli.commands",
        "pdserve.operations.up",
        "tests.fakes.engine_process",
    ):
        importlib.import_module(module)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the first test had begun with
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
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
                _become(order, *descriptors)
            children.add(answer)
            for descriptor in descriptors:
                os.close(descriptor)
        channel.send(str(answer).encode())
    for child in children:
        os.kill(child, signal.SIGKILL)


def _become(order: dict[str, Any], stdin: int, stdout: int) -> NoReturn:
    code: Any = 1
    argv = order["argv"]
    try:
        if order["session"]:
            os.setsid()
        for signum in order["ignored"]:
            signal.signal(signum, signal.SIG_IGN)
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        os.dup2(stdout, 2)
        os.closerange(3, 64)
        for name, number in (("stdout", 1), ("stderr", 2)):
            raw = io.FileIO(number, "wb", closefd=False)
            setattr(sys, name, io.TextIOWrapper(raw, encoding="utf-8", write_through=True))
        os.environ.clear()
        os.environ.update(order["env"])
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
