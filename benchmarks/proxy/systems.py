"""Starting what is measured: each proxy a process on its own core, mock and generator on another."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.proxy import pdserve_settings, wire
from benchmarks.proxy.connections import Address

SYSTEMS = ("direct", "toy", "pdserve-interpreted", "vllm-router", "pdserve")
"""In the order of their visits, which turns: the two that are compared are neighbours in four of five."""
ROUTER_VERSION = "0.1.17"
READY_WITHIN = 60.0


class StartError(Exception):
    """A system cannot be started. The message says why."""


@dataclass(frozen=True)
class Cores:
    """`proxy` is where the measured process runs, `harness` where mock and generator do."""

    harness: int
    proxy: int

    @staticmethod
    def choose(wanted: str | None = None) -> Cores:
        """`wanted`: HARNESS,PROXY."""
        if wanted:
            harness, proxy = map(int, wanted.split(","))
            return Cores(harness, proxy)
        allowed = sorted(os.sched_getaffinity(0))
        return Cores(allowed[0], allowed[-1])


@contextmanager
def pinned(core: int) -> Iterator[None]:
    """Children started inside run on this core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def request(address: Address, message: bytes, timeout: float = 10.0) -> tuple[int, bytes]:
    """One request on a connection of its own, for what is not measured. OSError."""
    with socket.create_connection((address.host, address.port), timeout) as connection:
        connection.sendall(message.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        received = b""
        while b"\r\n\r\n" not in received:
            data = connection.recv(65536)
            if not data:
                raise ConnectionResetError("closed before an answer")
            received += data
        head, _, body = received.partition(b"\r\n\r\n")
        length = next(
            (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        while len(body) < length and (data := connection.recv(65536)):
            body += data
    return int(head.split()[1]), body


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Mock:
    """The engines of all systems."""

    process: subprocess.Popen[str]
    ports: dict[str, list[int]]

    @staticmethod
    def start(cores: Cores) -> Mock:
        with pinned(cores.harness):
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.proxy.mock"],
                stdout=subprocess.PIPE,
                stdin=subprocess.DEVNULL,
                text=True,
            )
        assert process.stdout is not None
        return Mock(process, json.loads(process.stdout.readline()))

    def configure(self, settings: dict[str, float | bool]) -> None:
        self._ask(wire.post("/mock/config", json.dumps(settings).encode()))

    def go(self) -> None:
        self._ask(wire.post("/mock/go", b"{}"))

    def finish(self) -> None:
        self._ask(wire.post("/mock/finish", b"{}"))

    def stats(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._ask(wire.get("/mock/stats")))
        return answer

    def stop(self) -> None:
        stop(self.process)

    def _ask(self, message: bytes) -> bytes:
        status, body = request(Address("127.0.0.1", self.ports["bootstrap"][0]), message)
        if status != 200:
            raise StartError(f"the mock refused {message[:40]!r}: {body.decode()}")
        return body


def stop(process: subprocess.Popen[str], within: float = 15.0) -> None:
    process.terminate()
    try:
        process.wait(within)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@dataclass
class System:
    """A proxy that serves. `process` is None for `direct`."""

    name: str
    address: Address
    process: subprocess.Popen[str] | None

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    def stop(self) -> None:
        if self.process:
            stop(self.process)


def is_compiled() -> bool:
    """Whether the pdserve that is installed beside this interpreter is. StartError: none is."""
    argv = [sys.executable, "-P", "-m", "pdserve.cli.main", "--version"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=pdserve_settings.environment())
    if done.returncode:
        raise StartError(f"no pdserve is installed:\n{done.stderr}")
    return "compiled" in done.stdout.split()


def router_argv() -> list[str] | None:
    """The command of vllm-router beside this interpreter or on PATH; None: not installed."""
    beside = Path(sys.executable).with_name("vllm-router")
    program = str(beside) if beside.exists() else shutil.which("vllm-router")
    return [program] if program else None


def command(name: str, port: int, mock: dict[str, list[int]], folder: Path) -> list[str]:
    """StartError: unknown, or not installed."""
    urls = {role: [f"http://127.0.0.1:{number}" for number in numbers] for role, numbers in mock.items()}
    if name == "toy":
        roles = (",".join(urls[role]) for role in ("prefill", "decode", "bootstrap"))
        return [sys.executable, "-m", "benchmarks.proxy.toy", str(port), *roles]
    if name == "vllm-router":
        router = router_argv()
        if router is None:
            raise StartError(f"vllm-router is not installed (pip install vllm-router=={ROUTER_VERSION})")
        prefills = zip(urls["prefill"], mock["bootstrap"], strict=True)
        return [
            *router, "--vllm-pd-disaggregation", "--kv-connector", "mooncake",
            *(word for url, bootstrap in prefills for word in ("--prefill", url, str(bootstrap))),
            *(word for url in urls["decode"] for word in ("--decode", url)),
            "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin",
            "--prometheus-port", str(free_port()), "--log-level", "error",
        ]  # fmt: skip
    name, _, other_python = name.partition("@")
    bare, _, variant = name.partition("-")
    config = folder / f"{name}-{port}.json"
    try:
        if bare != "pdserve":
            raise KeyError(name)
        settings = pdserve_settings.proxy_json(port, mock, folder, variant)
    except KeyError:
        raise StartError(f"no such system: {name}") from None
    config.write_text(json.dumps(settings))
    # With -P what is installed is measured, as users have it; without, the source in the folder that this runs in.
    python = [sys.executable] if variant == pdserve_settings.INTERPRETED else [other_python or sys.executable, "-P"]
    return [*python, "-m", "pdserve.proxy", "--config", str(config), "--no-control"]


def start(name: str, mock: Mock, cores: Cores, folder: Path, wrap: Sequence[str] = ()) -> System:
    """Starts it and waits until it has answered a request. `wrap`: what replaces `python -m` (a profiler) of one that
    is interpreted."""
    if name == "direct":
        return System(name, Address("127.0.0.1", mock.ports["decode"][0]), None)
    port = free_port()
    argv = command(name, port, mock.ports, folder)
    if wrap:
        argv = [*wrap, *argv[2:]]
    log = folder / f"{name.partition('@')[0]}-{port}.log"
    with log.open("w") as output, pinned(cores.proxy):
        process = _spawn(argv, output)
    system = System(name, Address("127.0.0.1", port), process)
    deadline = time.monotonic() + READY_WITHIN
    probe = wire.post("/v1/chat/completions", wire.chat(512, 0, stream=False))
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError):
            if request(system.address, probe)[0] == 200:
                return system
        time.sleep(0.05)
    system.stop()
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
    raise StartError(f"{name} did not answer within {READY_WITHIN:.0f} s or ended ({process.returncode}):\n{tail}")


def _spawn(argv: list[str], output: IO[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=pdserve_settings.environment(),
        text=True,
    )
