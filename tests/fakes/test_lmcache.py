"""The fake LMCache server keeps to what the real one (0.5.6) was seen to do."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch.deployment import free_ports

pytestmark = pytest.mark.process

FAKE = Path(__file__).with_name("lmcache.py")
REQUIRED = ("--l1-size-gb", "1", "--eviction-policy", "LRU")


class Fake:
    """A running fake; `lines` are what it has said on stderr so far."""

    def __init__(self, *arguments: str, **faults: str) -> None:
        self.port, self.http_port = free_ports(2)
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(FAKE),
                "--port",
                str(self.port),
                "--http-port",
                str(self.http_port),
                "--instance-id",
                "mine",
                *arguments,
            ],
            env={**os.environ, **{f"FAKE_LMCACHE_{name.upper()}": value for name, value in faults.items()}},
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, text: str) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if text in line:
                return
        raise AssertionError(f"{text!r} never came: {self.lines}")

    def end(self) -> tuple[int, str]:
        assert self.process.stderr is not None
        self.lines += self.process.stderr.readlines()
        return self.process.wait(), "".join(self.lines)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}{path}") as answer:
            return json.load(answer)

    def post(self, path: str, body: dict[str, Any]) -> None:
        request = urllib.request.Request(f"http://127.0.0.1:{self.http_port}{path}", json.dumps(body).encode())
        urllib.request.urlopen(request).close()


@contextlib.contextmanager
def fake(*arguments: str, **faults: str) -> Iterator[Fake]:
    started = Fake(*arguments, **faults)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.communicate()


@contextlib.contextmanager
def ready(*arguments: str, **faults: str) -> Iterator[Fake]:
    with fake(*REQUIRED, *arguments, **faults) as started:
        started.wait_for("Uvicorn running on")
        yield started


def test_it_is_healthy_and_names_its_instance() -> None:
    with ready() as server:
        assert server.get("/healthcheck") == {"status": "healthy"}
        assert server.get("/config")["mp"]["instance_id"] == "mine"
        socket.create_connection(("127.0.0.1", server.port)).close()


def test_it_logs_what_the_real_one_logs_while_it_starts() -> None:
    with ready() as server:
        output = "".join(server.lines)
    order = [
        "Starting LMCache HTTP server on",
        "zmq cache server is running",
        "cache server is running...",
        "Application startup complete.",
        "Uvicorn running on",
    ]
    assert [text for text in order if text in output] == order


@pytest.mark.parametrize(
    ("mode", "key"),
    [("lmcache_driven", "registered_gpu_ids"), ("auto", "registered_non_cuda_instance_ids")],
)
def test_registered_workers_are_where_the_transfer_mode_puts_them(mode: str, key: str) -> None:
    with ready("--supported-transfer-mode", mode, registered="2") as server:
        status = server.get("/status")
        assert len(status[key]) == 2
        server.post("/fake/script", {"registered": 0})
        assert server.get("/status")[key] == []


def test_what_is_stored_is_counted_until_it_is_cleared() -> None:
    with ready() as server:
        server.post("/fake/store", {"objects": 2, "bytes": 1024})
        l1 = server.get("/status")["storage_manager"]["l1_manager"]
        assert (l1["total_object_count"], l1["memory_used_bytes"], l1["memory_total_bytes"]) == (2, 1024, 1 << 30)
        server.post("/cache/clear", {})
        assert server.get("/status")["storage_manager"]["l1_manager"]["total_object_count"] == 0


def test_term_ends_it_as_it_ends_the_real_one() -> None:
    with ready() as server:
        server.process.terminate()
        code, output = server.end()
    assert code == -signal.SIGTERM
    assert "LMCache HTTP server stopped" in output


@pytest.mark.parametrize("given", [("--l1-size-gb", "1"), ("--eviction-policy", "LRU"), ()])
def test_size_and_policy_are_both_required(given: tuple[str, ...]) -> None:
    with fake(*given) as server:
        code, output = server.end()
    assert code == 1
    assert output.endswith("ValueError: Legacy L1 configuration requires --l1-size-gb and --eviction-policy\n")


def test_a_bad_value_is_an_argv_error() -> None:
    with fake("--l1-size-gb", "1", "--eviction-policy", "FIFO") as server:
        code, output = server.end()
    assert code == 2
    assert "argument --eviction-policy: invalid choice" in output


def test_more_memory_than_any_host_has_fails_as_the_allocator_does() -> None:
    with fake("--l1-size-gb", "99999", "--eviction-policy", "LRU") as server:
        code, output = server.end()
    assert code == 3
    assert "DefaultCPUAllocator: can't allocate memory" in output


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--port", "zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:{port}')"),
        ("--http-port", "[Errno 98] error while attempting to bind on address ('127.0.0.1', {port})"),
    ],
)
def test_a_taken_port_is_a_start_up_error(flag: str, text: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with fake(*REQUIRED, flag, str(port)) as server:
            code, output = server.end()
    assert code == 3
    assert text.format(port=port) in output


@pytest.mark.parametrize(("when", "bound"), [("import", False), ("start", True)])
def test_it_dies_at_the_configured_moment(when: str, bound: bool) -> None:
    with fake(*REQUIRED, die_at=when, exit_code="7", last_lines="first\\nlast") as server:
        code, output = server.end()
    assert code == 7
    assert output.endswith("first\nlast\n")
    assert ("zmq cache server is running" in output) is bound


def test_it_can_die_once_it_has_been_healthy() -> None:
    with ready(die_at="ready") as server:
        assert server.get("/healthcheck") == {"status": "healthy"}
        assert server.end()[0] == 1


def test_a_hanging_server_never_listens_but_can_be_stopped() -> None:
    with fake(*REQUIRED, hang="1") as server:
        server.wait_for("Starting LMCache HTTP server on")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.http_port))
        server.process.terminate()
        assert server.end()[0] == -signal.SIGTERM


def test_a_stale_server_is_healthy_under_another_name() -> None:
    with ready(wrong_id="1") as server:
        assert server.get("/healthcheck") == {"status": "healthy"}
        assert server.get("/config")["mp"]["instance_id"] != "mine"


def test_an_unhealthy_server_answers_503() -> None:
    with ready(unhealthy="1") as server, pytest.raises(urllib.error.HTTPError, match="503"):
        server.get("/healthcheck")


def test_it_can_refuse_to_stop() -> None:
    with ready(ignore_term="1") as server:
        server.process.terminate()
        assert server.get("/healthcheck") == {"status": "healthy"}
