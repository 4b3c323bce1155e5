"""The admin endpoints: only with the token, and only what they are asked to do; the file of their unix socket."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from pdserve.errors import RecipeError, StartError
from pdserve.pd.config.proxy import WorkerConfig
from pdserve.pd.config.settings import AdminSettings
from pdserve.pd.limits import keys
from pdserve.pd.serve import admin
from pdserve.pd.serve.admin_server import AdminServer
from tests.tables import each_row

TOKEN = "correct-horse-battery"
NEW = {"name": "decode-9", "role": "decode", "url": "http://10.0.0.9:8200"}


class Pool:
    """A registry that only remembers."""

    def __init__(self) -> None:
        self.workers = {"decode-0": "ready"}
        self.added: list[WorkerConfig] = []

    def describe(self) -> list[dict[str, Any]]:
        return [{"name": name, "state": state} for name, state in self.workers.items()]

    def add(self, worker: WorkerConfig) -> None:
        if worker.name in self.workers:
            raise ValueError(f"there is a worker {worker.name} already")
        self.added.append(worker)
        self.workers[worker.name] = "starting"

    def drain(self, name: str) -> None:
        assert self.workers[name]
        self.workers[name] = "draining"

    def remove(self, name: str) -> None:
        del self.workers[name]


async def reloaded() -> dict[str, str]:
    return {"keys": "ok"}


class Admin:
    def __init__(self, token: str | None = TOKEN, header: str | None = f"Bearer {TOKEN}") -> None:
        self.pool = Pool()
        self.reloads = 0
        headers = {} if header is None else {"authorization": header}
        self.http = TestClient(admin.app(self.pool, self._reload, lambda: b"figures", token), headers=headers)

    async def _reload(self) -> dict[str, str]:
        self.reloads += 1
        return {"keys": "ok"}


CALLS = [
    ("GET", "/workers"),
    ("POST", "/workers"),
    ("POST", "/workers/decode-0/drain"),
    ("DELETE", "/workers/decode-0"),
    ("POST", "/reload"),
]


@each_row("method, path", CALLS)
@each_row(
    "header", [None, "", "Bearer", "Bearer ", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", TOKEN]
)
def test_without_the_token_nothing_is_shown_and_nothing_is_done(method: str, path: str, header: str | None) -> None:
    there = Admin(header=header)
    answer = there.http.request(method, path, json=NEW)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == 401
    assert "decode-0" not in answer.text
    assert (there.pool.workers, there.pool.added, there.reloads) == ({"decode-0": "ready"}, [], 0)


def test_a_header_of_other_bytes_is_refused() -> None:
    there = Admin(header=None)
    assert there.http.get("/workers", headers={b"authorization": b"Bearer \xff\xfe"}).status_code == 401


def test_without_a_configured_token_none_is_asked_for() -> None:
    assert Admin(token=None, header=None).http.get("/workers").status_code == 200


@each_row(
    "change",
    [
        {"role": "router"},
        {"name": ""},
        {"name": "a\nb"},
        {"name": "n" * 65},
        {"url": "ftp://h:1"},
        {"url": "http://h"},
        {"url": "http://:80"},
        {"url": "http://h:99999"},
        {"url": "http://user:pw@h:1"},
        {"url": "http://h:1/v1"},
        {"url": "http://h:1?x"},
        {"bootstrap_url": "tcp://h:1"},
        {"kv_events_url": "http://h:1"},
        {"surprise": 1},
        {"url": 7},
    ],
)
def test_what_is_no_worker_is_400_and_not_added(change: dict[str, Any]) -> None:
    there = Admin()
    answer = there.http.post("/workers", json=NEW | change)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "BadRequestError"
    assert there.pool.added == []


@each_row("body", [b"", b"{", b"[]", b"null", b"\xff"])
def test_a_body_that_is_no_json_object_is_400(body: bytes) -> None:
    assert Admin().http.post("/workers", content=body).status_code == 400


def test_the_token_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"  {TOKEN}\n")
    assert keys.read_token(path) == TOKEN


@each_row("content, what", [(b"", "fewer than 16"), (b"short\n", "fewer than 16"), (b"\xff", "UTF-8")])
def test_a_token_that_protects_nothing_is_refused(tmp_path: Path, content: bytes, what: str) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(RecipeError, match=what):
        keys.read_token(path)


def test_a_token_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="No such file"):
        keys.read_token(tmp_path / "token")


# --- the file of the admin's unix socket: whose it may replace, and which it removes


def server(path: Path) -> AdminServer:
    return AdminServer(AdminSettings(socket=str(path)), Pool(), reloaded, bytes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "admin.sock"


@pytest.fixture
def listening(path: Path) -> Iterator[socket.socket]:
    """A stranger's, at the path."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.bind(str(path))
        stranger.listen(1)
        yield stranger


def refused(path: Path) -> str:
    with pytest.raises(StartError) as caught:
        server(path)
    assert str(path) in caught.value.what
    return caught.value.what


def test_a_socket_at_which_a_process_answers_is_left_to_it(path: Path, listening: socket.socket) -> None:
    assert "another process answers there" in refused(path)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    # Also while their queue is full: they are busy, and not gone.
    waiting = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    for client in waiting:
        client.setblocking(False)
        client.connect_ex(str(path))
    assert "that may be in use" in refused(path)
    for client in waiting:
        client.close()


async def test_a_second_proxy_is_refused_and_the_first_ones_socket_stays(path: Path) -> None:
    first = server(path)
    assert "another process answers there" in refused(path)
    first.start()
    assert "another process answers there" in refused(path)
    await first.stop()
    assert not path.exists()


def test_what_a_killed_proxy_left_is_replaced(path: Path, listening: socket.socket) -> None:
    listening.close()
    asyncio.run(server(path).stop())
    assert not path.exists()


def test_what_is_no_socket_is_left_alone(path: Path, tmp_path: Path) -> None:
    path.write_text("mine")
    assert "it is no socket" in refused(path)
    assert path.read_text() == "mine"
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere.sock")
    assert "it is no socket" in refused(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file another user's")
def test_the_rest_of_another_user_is_left_alone(path: Path, listening: socket.socket) -> None:
    listening.close()
    os.chown(path, 12345, -1)
    assert "of another user (uid 12345)" in refused(path)
    assert path.is_socket()


async def test_a_proxy_removes_only_the_socket_that_it_made(path: Path) -> None:
    ours = server(path)
    path.unlink()
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(str(path))
        await ours.stop()
        assert path.is_socket()


async def test_it_is_for_this_user_only(path: Path) -> None:
    ours = server(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    await ours.stop()


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    assert "No such file or directory" in refused(tmp_path / "nowhere" / "admin.sock")
