"""Real processes for the proxy's tests: fake engines and the proxy itself, all on free ports."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode

import httpx

from pdserve.pd.config.proxy import Protocol, ProxyConfig, WorkerConfig
from pdserve.pd.processes import shared_numbers
from pdserve.pd.workers.load import LoadBoard
from pdserve.pd.workers.registry import Registry
from pdserve.system import procfs
from tests.nursery import PIPE_BYTES, REPOSITORY, Forked, Nursery

MODEL = "tiny"
KEY = "engine-key"
PLAIN: dict[str, Any] = {"trust_env": False, "timeout": 90, "verify": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)}
"""Options of an HTTP client: it loads no certificates of the system, which takes longer than a proxy's start."""
ROUND_ROBIN = {"prefill": {"kind": "round_robin"}, "decode": {"kind": "round_robin"}}
KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


class Child:
    """A process whose log says when it is ready."""

    def __init__(
        self, argv: list[str], env: dict[str, str], *, stdin: int | None = subprocess.DEVNULL, fresh: bool = False
    ) -> None:
        """`fresh`: executed, and not forked."""
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1", **env}
        self.process: subprocess.Popen[str] | Forked
        if not fresh and Nursery.shared().forks(argv, env):
            self.process = Forked(Nursery.shared(), argv, env, stdin=stdin)
        else:
            self.process = subprocess.Popen(
                argv,
                cwd=REPOSITORY,
                env=env,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pipesize=PIPE_BYTES,
                text=True,
            )
        self.log: list[str] = []
        self.port = 0
        self.url = ""
        self.http: httpx.Client

    def listens(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, **PLAIN)
        # Bodies that a test has written itself, too.
        self.http.headers["content-type"] = "application/json"

    def until(self, pattern: str) -> re.Match[str]:
        """Read the log up to a line that matches."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line)
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"ended with {self.process.wait()} before {pattern!r}:\n{''.join(self.log)}")

    def until_each(self, *patterns: str) -> None:
        """Read the log until a line has matched each pattern, in whatever order they come."""
        awaited = set(patterns)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line)
            awaited -= {pattern for pattern in awaited if re.search(pattern, line)}
            if not awaited:
                return
        raise AssertionError(f"ended with {self.process.wait()} before {awaited}:\n{''.join(self.log)}")

    def end(self, signum: int = signal.SIGKILL) -> int:
        """Send a signal and wait for the end; the exit code. Safe to call again."""
        if self.process.poll() is None:
            self.process.send_signal(signum)
        code = self.process.wait()
        if self.url:
            self.http.close()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()
        return code


class Fake(Child):
    """A fake engine."""

    def __init__(
        self,
        name: str,
        role: str,
        *,
        port: int = 0,
        bootstrap: int = 0,
        ranks: int = 1,
        connector: str = "MooncakeConnector",
        lease: float = 30,
        **faults: object,
    ) -> None:
        self.name, self.role, self.ranks, self.connector = name, role, ranks, connector
        argv = [sys.executable, "tests/fakes/engine.py", "--served-model-name", MODEL, "--port", str(port)]
        argv += ["--enable-prompt-tokens-details", "--data-parallel-size", str(ranks)]
        if role in KV_ROLES:
            extra = {"kv_lease_duration": lease}
            kv = {"kv_connector": connector, "kv_role": KV_ROLES[role], "kv_connector_extra_config": extra}
            argv += ["--kv-transfer-config", json.dumps(kv)]
        env = {
            "VLLM_API_KEY": KEY,
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bootstrap),
            "VLLM_NIXL_SIDE_CHANNEL_PORT": "0",
        }
        super().__init__(argv, env | {f"FAKE_{name.upper()}": str(value) for name, value in faults.items()})
        self.bootstrap = 0

    def ready(self) -> None:
        if self.role == "prefill" and self.connector == "MooncakeConnector":
            self.bootstrap = int(self.until(r"Bootstrap server on port (\d+)")[1])
        self.listens(int(self.until(r"Starting vLLM server on http://127.0.0.1:(\d+)")[1]))

    def config(self) -> WorkerConfig:
        bootstrap = f"http://127.0.0.1:{self.bootstrap}" if self.bootstrap else None
        return WorkerConfig.model_validate(
            {"name": self.name, "role": self.role, "url": self.url, "bootstrap_url": bootstrap, "ranks": self.ranks}
        )

    def state(self) -> dict[str, int]:
        return dict(self.http.get("/fake/state").json())

    def wait(self, **state: int) -> None:
        """Wait until the fake's state has these values."""
        answer = self.http.get(f"/fake/wait?{urlencode(state)}")
        assert answer.status_code == 200, f"{self.name}: waited for {state}, is {answer.json()}"

    def script(self, **faults: object) -> None:
        self.http.post("/fake/script", json=faults)

    def requests(self) -> list[dict[str, Any]]:
        return list(self.http.get("/fake/requests").json())

    def transferred(self) -> int:
        """Prompt tokens whose KV came from a prefill."""
        match = re.search(
            r"prompt_tokens_by_source_total{[^}]*external_kv_transfer[^}]*} (\d+)", self.http.get("/metrics").text
        )
        assert match is not None
        return int(match[1])

    def body(self) -> dict[str, Any]:
        """Body of the only request."""
        (request,) = self.requests()
        return dict(request["body"])


class Proxy(Child):
    """The real proxy process.

    `moments`: constants of its modules (`pdserve.pd.protocols.nixl.LAST_MOMENT_SECONDS`) with other values. Each is how
    long the proxy waits for something that an engine does at once. A test that is about what the engine then
    does gives it more: how fast the machine is that runs both must not decide.
    """

    def __init__(
        self,
        path: Path,
        config: ProxyConfig,
        *,
        key: str,
        control: bool,
        moments: Mapping[str, float] | None = None,
        fresh: bool = False,
    ) -> None:
        path.write_text(config.model_dump_json())
        program = ["-m", "pdserve.proxy"] if not moments else ["-c", _patient(moments)]
        argv = [sys.executable, *program, "--config", str(path)]
        super().__init__(
            argv if control else [*argv, "--no-control"],
            {"PDSERVE_ENGINE_KEY": key},
            stdin=subprocess.PIPE if control else subprocess.DEVNULL,
            fresh=fresh,
        )

    def end(self, signum: int = signal.SIGKILL) -> int:
        members = self.members if self.process.poll() is None else set()
        code = super().end(signum)
        for member in members:
            # They die of their parent's death, and become children of this process.
            with suppress(ChildProcessError):
                os.waitpid(member, 0)
        return code

    def ready(self) -> None:
        self.listens(int(self.until(r"serving on https?://127.0.0.1:(\d+)")[1]))

    @property
    def members(self) -> set[int]:
        """PIDs of the processes that serve."""
        return procfs.descendants(self.process.pid)

    def memory(self, name: str) -> int:
        """Bytes of its one process that serves. `name`: of a line in /proc/PID/status."""
        (serving,) = self.members
        match = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{serving}/status").read_text())
        assert match is not None
        return int(match[1]) * 1024

    def shows(self, figure: str) -> str:
        """Wait until a page of metrics has this; the page. Over connections of its own: any process may answer, and
        each writes its figures twice a second."""
        while figure not in (page := httpx.get(f"{self.url}/metrics", **PLAIN).text):
            pass
        return page

    def send_all(self, signum: int) -> None:
        """A signal for every process of it, as for a machine that is suspended."""
        for pid in (self.process.pid, *self.members):
            os.kill(pid, signum)

    def push(self, worker: str, state: str) -> None:
        """Tell it a worker's state, and wait until it knows."""
        self.push_line(json.dumps({"worker": worker, "state": state}))
        self.until(rf"control: {worker} is {state}")

    def push_line(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    @contextmanager
    def begun(self, path: str, body: dict[str, Any]) -> Iterator[Iterator[str]]:
        """A stream whose first line was read; its other lines, without empty ones. Over a connection of its own."""
        with httpx.stream("POST", self.url + path, json=body, headers=self.http.headers, **PLAIN) as answer:
            lines = (line for line in answer.iter_lines() if line)
            next(lines)
            yield lines

    def open(self, path: str, body: dict[str, Any]) -> socket.socket:
        """Send a request without waiting for anything: a client that may leave by closing the socket."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: proxy\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(data)}\r\n\r\n"
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        connection.sendall(head.encode() + data)
        return connection


def _patient(moments: Mapping[str, float]) -> str:
    """The program of a proxy with other constants."""
    lines = ["import sys, pdserve.proxy"]
    for name, seconds in moments.items():
        module, _, constant = name.rpartition(".")
        lines += [f"import {module}", f"assert {module}.{constant}", f"{module}.{constant} = {seconds!r}"]
    return "\n".join([*lines, "sys.exit(pdserve.proxy.main())"])


class Deployment:
    """xPyD fake engines behind the proxy. Everything it starts ends with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self.prefills: list[Fake] = []
        self.decodes: list[Fake] = []
        self.aggregated: list[Fake] = []
        self.proxy: Proxy

    def up(
        self,
        prefills: int = 1,
        decodes: int = 1,
        *,
        aggregated: int = 0,
        control: bool = False,
        ranks: int = 1,
        key: str = KEY,
        nixl: bool = False,
        moriio: bool = False,
        prefill: dict[str, object] | None = None,
        decode: dict[str, object] | None = None,
        moments: Mapping[str, float] | None = None,
        fresh: bool = False,
        **config: Any,
    ) -> Self:
        """Start engines and proxy. `prefill` and `decode`: options and faults of the engines; `moments`, `fresh`: as
        Proxy has them; `config`: fields of ProxyConfig."""
        if aggregated:
            prefills = decodes = 0
        connector = "NixlConnector" if nixl else "MoRIIOConnector" if moriio else None
        shared = {} if connector is None else {"connector": connector}
        for i in range(prefills):
            self.prefills.append(self.engine(f"prefill-{i}", "prefill", ranks=ranks, **shared, **(prefill or {})))
        for i in range(decodes):
            self.decodes.append(self.engine(f"decode-{i}", "decode", **shared, **(decode or {})))
        for i in range(aggregated):
            self.aggregated.append(self.engine(f"aggregated-{i}", "aggregated"))
        split: Protocol = "nixl" if nixl else "moriio" if moriio else "mooncake"
        protocol: Protocol = "aggregated" if aggregated else split
        self.proxy = Proxy(
            self.folder / "proxy.json",
            self.config(**{"protocol": protocol, **config}),
            key=key,
            control=control,
            moments=moments,
            fresh=fresh,
        )
        self._stack.callback(self.proxy.end)
        self.proxy.ready()
        if control:
            for fake in self.fakes:
                self.proxy.push(fake.name, "ready")
        return self

    def engine(self, name: str, role: str, **options: Any) -> Fake:
        fake = Fake(name, role, **options)
        self._stack.callback(fake.end)
        fake.ready()
        return fake

    @property
    def fakes(self) -> list[Fake]:
        return [*self.prefills, *self.decodes, *self.aggregated]

    def config(self, protocol: Protocol, **fields: Any) -> ProxyConfig:
        return proxy_config(
            **{"protocol": protocol, "workers": [fake.config().model_dump() for fake in self.fakes]} | fields
        )

    def rewrite(self, **config: Any) -> None:
        """Change fields in the file of the proxy's configuration, which it may be told to read again."""
        path = self.folder / "proxy.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))

    def complete(self, prompt: object = "hello world", **more: Any) -> httpx.Response:
        return self.proxy.http.post("/v1/completions", json={"model": MODEL, "prompt": prompt, "max_tokens": 8} | more)

    @contextmanager
    def clients(self, body: dict[str, Any], *, count: int = 4, kept: bool = False) -> Iterator[Counter[int]]:
        """So many ask, plain and in streams, until the end of the block: the statuses that they got, 0 of a stream that
        was cut. Each request is over a connection of its own, or (`kept`) ten are over one."""
        over, statuses = threading.Event(), Counter[int]()

        def ask(stream: bool) -> None:
            while not over.is_set():
                with httpx.Client(base_url=self.proxy.url, **PLAIN) as client:
                    for _ in range(10 if kept else 1):
                        answer = client.post("/v1/completions", json=body | {"stream": stream})
                        whole = not stream or answer.text.rstrip().endswith("[DONE]")
                        statuses[answer.status_code if whole else 0] += 1

        with ThreadPoolExecutor(count) as pool:
            asking = [pool.submit(ask, bool(number % 2)) for number in range(count)]
            try:
                yield statuses
            finally:
                over.set()
            for each in asking:
                each.result()

    @contextmanager
    def asking(self, prompt: object = "hello world", **more: Any) -> Iterator[Future[httpx.Response]]:
        """One request that is under way."""
        with ThreadPoolExecutor(1) as pool:
            yield pool.submit(self.complete, prompt, **more)

    def workers(self) -> dict[str, dict[str, Any]]:
        """What a client with a connection of its own is told of each worker."""
        page = httpx.get(f"{self.proxy.url}/workers", **PLAIN).json()
        return {worker["name"]: worker for worker in page["workers"]}

    def asked(self, *fakes: Fake) -> tuple[Fake, ...]:
        """The one of these that gets a request, and then the others; waits until it has one."""
        while not any(fake.state()["received"] for fake in fakes):
            pass
        return tuple(sorted(fakes, key=lambda fake: fake.state()["received"] == 0))

    def idle(self) -> None:
        """Every engine is without running and waiting requests, and no prefill holds KV that nobody fetched."""
        for fake in self.fakes:
            fake.wait(running=0, waiting=0, held=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()


def proxy_config(**fields: Any) -> ProxyConfig:
    """Of a proxy on loopback, `protocol` and `workers` among its fields."""
    values: dict[str, Any] = {
        "port": 0,
        "served_name": MODEL,
        "request_timeout_seconds": 60,
        "drain_seconds": 20,
        # Most tests are about what a failure says, and that at once (test_hold.py has the rest).
        "on_empty_pool": "fail",
        "max_body_bytes": 1_000_000,
        # What engines have seen is counted.
        "prewarm": False,
        "allowed_hosts": ["proxy"],
    }
    return ProxyConfig.model_validate(values | fields)


def registry_of(protocol: Protocol, *workers: WorkerConfig, **config: Any) -> Registry:
    """Return what a proxy of one process knows of these workers."""
    wanted = proxy_config(protocol=protocol, workers=[worker.model_dump() for worker in workers], **config)
    return Registry(wanted, LoadBoard(shared_numbers.private_numbers(LoadBoard.cells(1))))


def over_socket(path: Path | str, **headers: str) -> httpx.Client:
    """A client of the admin on a unix socket."""
    transport = httpx.HTTPTransport(uds=str(path), verify=PLAIN["verify"])
    return httpx.Client(transport=transport, base_url="http://admin", headers=headers, timeout=90)


def keys_file(folder: Path, *keys: tuple[str, str], **limits: int) -> dict[str, str]:
    """The `auth` of a proxy with API keys, each with its name; the limits are those of the first."""
    first: dict[str, Any] = dict(limits)
    lines = []
    for name, key in keys:
        lines.append(json.dumps({"name": name, "sha256": sha256(key.encode()).hexdigest(), **first}) + "\n")
        first = {}
    (folder / "keys").write_text("".join(lines))
    return {"keys_file": str(folder / "keys")}


def open_links(pid: int) -> list[str]:
    """Return where the descriptors of a process lead; one may be closed while we look."""
    links = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            links.append(str(descriptor.readlink()))
    return links
