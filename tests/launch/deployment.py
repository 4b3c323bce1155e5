"""`pdserve` as a user runs it, over fake engines: recipes with free ports, the command as a real process, its lines."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdserve.errors import PdserveError
from pdserve.roles import ENGINE_ROLES
from pdserve.run.directory import RunDir
from pdserve.run.state import DeploymentState
from pdserve.system import procfs
from pdserve.system.process import send
from pdserve.system.procfs import ProcessId
from tests.nursery import Forked, Nursery

REPOSITORY = Path(__file__).resolve().parents[2]
ENGINE = [sys.executable, str(REPOSITORY / "tests/fakes/engine.py")]
PDSERVE = (sys.executable, "-m", "pdserve.cli.main")
LMCACHE = [sys.executable, str(REPOSITORY / "tests/fakes/lmcache.py")]
BODY = {"model": "fake", "prompt": "one two three", "max_tokens": 2}
LINE_SECONDS = 120.0
"""How long a test waits for a line before it fails: a limit, not a measurement."""
_POLL_SECONDS = 0.03
_PORTS = ["proxy", "prefill", "decode", "bootstrap", "lmcache", "lmcache_http", "aggregated", "nixl", "router_metrics"]
_EVENTS, _LINES, _WIDTH = 12, 25, 240
"""How much of a deployment the report of a failed test has."""


def wait_until(what: str, look: Callable[[], object], timeout: float, *, why: Callable[[], str] = str) -> None:
    """Return when `look` is true, which only polling can see; AssertionError with `what` and what `why` says after
    `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not look():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:g} s: {what} {why()}".rstrip())
        time.sleep(_POLL_SECONDS)


def until(holds: Callable[[], bool]) -> None:
    """Wait for a fact that no line tells."""
    wait_until("it holds", holds, LINE_SECONDS)


def free_ports(count: int) -> list[int]:
    """First ports of `count` disjoint, free blocks of ten."""
    blocks: list[int] = []
    # Above the default transfer ports (15000 on), below the ephemeral ones, apart from those of another test process.
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    start = 20000 + (int(worker.removeprefix("gw")) % 10 * 1000 if worker else os.getpid() % 50 * 200)
    for block in range(start, 32000, 10):
        if all(_free(port) for port in range(block, block + 10)):
            blocks.append(block)
        if len(blocks) == count:
            return blocks
    raise AssertionError("no free ports")


def _free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def recipe(folder: Path, name: str = "fake", **changes: Any) -> Path:
    """A 1P1D recipe over fakes with LMCache. What is dead stays dead, unless `changes` set `restart`; `changes`: dotted
    keys with __ for the dots."""
    ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    document: dict[str, Any] = {
        "schema": 1,
        "name": name,
        "platform": "cpu",
        "model": {"path": str(model), "served_name": "fake"},
        "engine": {"command": ENGINE, "env": {"VLLM_CPU_KVCACHE_SPACE": 1}},
        "prefill": {
            "connector": {"kind": "multi", "of": [{"kind": "mooncake", "protocol": "tcp"}, {"kind": "lmcache-mp"}]}
        },
        "decode": {"connector": {"kind": "mooncake", "protocol": "tcp"}},
        "lmcache": {"command": LMCACHE, "l1_size_gb": 0.01, "transfer_mode": "auto", "chunk_size": 256},
        "ports": ports,
        "proxy": {"drain_seconds": 2},
        "timeouts": {"lmcache_seconds": 120, "engine_seconds": 120, "stop_seconds": 5, "attach_seconds": 60},
    }
    for key, value in changes.items():
        put(document, key.split("__"), value)
    for role in document.keys() & ENGINE_ROLES:
        document[role].setdefault("restart", {"policy": "never"})
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    return file


def put(document: dict[str, Any], path: list[str], value: Any) -> None:
    """Sets a nested value, making the mappings on the way; None removes."""
    for key in path[:-1]:
        document = document.setdefault(key, {})
    if value is None:
        document.pop(path[-1], None)
    else:
        document[path[-1]] = value


class Command:
    """One running `pdserve` command. Its lines are read as they come, so that a test waits for facts, not for time."""

    def __init__(self, *arguments: str | Path, env: Mapping[str, str] | None = None) -> None:
        argv = [*PDSERVE, *map(str, arguments)]
        environ = {**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})}
        self.popen: subprocess.Popen[str] | Forked
        if Nursery.shared().forks(argv, environ):
            self.popen = Forked(Nursery.shared(), argv, environ, stdin=None, session=True)
        else:
            self.popen = subprocess.Popen(
                argv,
                cwd=REPOSITORY,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._seen: list[str] = []
        self._leaving = False
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        with self.popen.stdout as stream:
            for line in stream:
                self._lines.put(line.rstrip("\n"))
                if self._leaving:
                    break
        self._lines.put(None)

    @property
    def output(self) -> str:
        """Return all that was read so far."""
        return "\n".join(self._seen)

    def expect(self, text: str) -> str:
        """Reads on until a line holds `text`. Fails when the command ends or is silent before."""
        while True:
            try:
                line = self._lines.get(timeout=LINE_SECONDS)
            except queue.Empty:
                raise AssertionError(f"{text!r} was not said within {LINE_SECONDS} s:\n{self.output}") from None
            if line is None:
                self._lines.put(None)
                raise AssertionError(f"the command ended without saying {text!r}:\n{self.output}")
            self._seen.append(line)
            if text in line:
                return line

    def finish(self) -> int:
        """Reads to the end and returns the exit code."""
        code = self.popen.wait(7 * LINE_SECONDS)  # below the limit of pytest, which would not show the output
        self._reader.join(LINE_SECONDS)
        while (line := self._lines.get()) is not None:
            self._seen.append(line)
        self._lines.put(None)
        return code

    def stop_reading(self) -> None:
        """Leaves the pipe, as `head` does after its last line: the reader ends with the next line that comes."""
        self._leaving = True

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.popen.send_signal(signal.SIGINT)


def pdserve(*arguments: str | Path) -> tuple[int, str]:
    """Runs a command to its end; (exit code, all that it printed)."""
    command = Command(*arguments)
    code = command.finish()
    return code, command.output


def execute(
    *argv: str | Path, env: Mapping[str, str | None] | None = None, cwd: Path = REPOSITORY, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end. `env`: what it has besides ours, None: what it has not. `options`: of a Popen."""
    changed = {**os.environ, **(env or {})}
    given = {name: value for name, value in changed.items() if value is not None}
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run(
        [*map(str, argv)], cwd=cwd, env=given, text=True, check=False, timeout=2 * LINE_SECONDS, **streams
    )


class Deployment:
    """One `pdserve up` and what it recorded, wherever it runs."""

    def __init__(self, command: Command | None, home: Path, name: str = "fake") -> None:
        self._command = command
        self.home = home
        self.name = name

    @property
    def command(self) -> Command:
        """The `up` in the foreground; a detached deployment has none."""
        assert self._command is not None
        return self._command

    @property
    def run(self) -> RunDir:
        return RunDir((self.home / self.name / "current").resolve())

    def state(self) -> DeploymentState:
        return self.run.read_state()

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The history, or the events of one kind."""
        return [event for event in self.run.read_events()[0] if kind in (None, event["event"])]

    def started(self) -> list[str]:
        """Names of processes that were ever started, in order."""
        return [event["name"] for event in self.events("start")]

    def stopped(self) -> list[str]:
        """Names in the order in which they were reported stopped."""
        return [event["name"] for event in self.events("stopped")]

    def node_of(self, process: str) -> str:
        return self.run.read_plan().process(process).node

    def id_of(self, name: str) -> ProcessId:
        """Identity of a process, of the launcher, or of `agent` / `guard`."""
        state = self.state()
        if name == "launcher":
            return state.launcher
        if name in ("agent", "guard"):
            node = next(iter(state.nodes.values()))
            return node.agent if name == "agent" else node.guard
        identity = state.processes[name].id
        assert identity is not None, f"{name} was not started"
        return identity

    def send_signal(self, name: str, signum: signal.Signals) -> None:
        """Send a signal to a process of the deployment."""
        assert send(self.id_of(name), signum)

    def wait_for(self, kind: str, *, after: str | None = None, **fields: Any) -> dict[str, Any]:
        """Return the first such event of the history (after the phase `after`); wait for it."""
        seen: list[dict[str, Any]] = []

        def happened() -> bool:
            passed = after is None
            for event in self.events():
                if passed and event["event"] == kind and fields.items() <= event.items():
                    seen.append(event)
                    return True
                passed = passed or event.get("phase") == after
            return False

        wait_until(f"{kind} {fields}", happened, 2 * LINE_SECONDS, why=lambda: str(self.events()))
        return seen[0]

    def all_ids(self) -> list[ProcessId]:
        """Everything that was recorded."""
        state = self.state()
        names = [name for name, process in state.processes.items() if process.id is not None]
        return [self.id_of(name) for name in (*names, "agent", "guard")]

    def post_mortem(self) -> str:
        """Return what it can say of a test that failed on it: its last events, why it failed, the ends of its logs.
        Empty if nothing was recorded. A failure that is seen once, on another machine, must explain itself."""
        try:
            parts = [json.dumps(event) for event in self.events()[-_EVENTS:]]
            logs = sorted(self.run.path / process.log for process in self.run.read_plan().processes)
            for file in (self.run.failure, *logs):
                if file.exists():
                    parts += [f"-- {file.name}", *file.read_text(errors="replace").splitlines()[-_LINES:]]
        except (OSError, PdserveError):
            return ""
        return "\n".join(part if len(part) <= _WIDTH else f"{part[:_WIDTH]}..." for part in parts)

    def hold(self, engine: str, point: str) -> None:
        """Let a fake engine wait there from now on; empty: nowhere."""
        self.script(engine, hold=point)

    def script(self, engine: str, **faults: object) -> None:
        """Tell a fake engine what to do wrong from now on."""
        import httpx

        url = f"http://127.0.0.1:{self.run.read_plan().process(engine).ports['http']}/fake/script"
        assert httpx.post(url, json=faults, trust_env=False, timeout=LINE_SECONDS).status_code == 200

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """A request through the proxy."""
        import httpx

        proxy = self.run.read_plan().proxy
        response = httpx.post(f"http://{proxy.host}:{proxy.port}{path}", json=body, timeout=120, trust_env=False)
        return response.status_code, response.json()


@contextmanager
def up(file: Path, home: Path, *arguments: str, name: str = "fake") -> Iterator[Deployment]:
    """`pdserve up` in the foreground, ended by Ctrl-C if the test has not ended it."""
    command = Command("up", file, *arguments)
    deployment = Deployment(command, home, name)
    try:
        yield deployment
    finally:
        if command.popen.poll() is None:
            command.interrupt()
        command.finish()


def assert_nothing_left(deployment: Deployment) -> None:
    """Assert that no recorded process lives, and no port of the plan is held by anybody."""
    left = [procfs.command(process.pid) for process in deployment.all_ids() if process.alive()]
    assert not left, left
    held = {
        f"{process.name}:{port}": owner
        for process in deployment.run.read_plan().processes
        for port in process.ports.values()
        if (owner := procfs.listener_owner(port)) is not None
    }
    assert not held, held


@contextmanager
def home_in(folder: Path) -> Iterator[Path]:
    """PDSERVE_HOME and the runtime secrets are in `folder` meanwhile, for a deployment that several tests share."""
    (folder / "runtime").mkdir(mode=0o700)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PDSERVE_HOME", str(folder / "home"))
        patched.setenv("XDG_RUNTIME_DIR", str(folder / "runtime"))
        yield folder / "home"


def serving(deployment: Deployment) -> Deployment:
    deployment.command.expect("serving fake at")
    return deployment


def routing(deployment: Deployment, worker: str) -> list[str]:
    """Return what the proxy was told of a worker, in order."""
    return [event["routing"] for event in deployment.events("route") if event["name"] == worker]


def read_json(text: str) -> Any:
    """The JSON document in a command's output."""
    return json.loads(text[text.index("{") :])
