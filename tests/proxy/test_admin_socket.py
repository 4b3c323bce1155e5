"""The file of the admin's unix socket: whose it may replace, and which it removes."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.errors import StartError
from pdserve.pd.config.proxy import WorkerConfig
from pdserve.pd.config.settings import AdminSettings
from pdserve.pd.serve.admin_server import AdminServer


class NoWorkers:
    def describe(self) -> list[dict[str, object]]:
        return []

    def add(self, worker: WorkerConfig) -> None:
        raise AssertionError

    def drain(self, name: str) -> None:
        raise AssertionError

    def remove(self, name: str) -> None:
        raise AssertionError


async def nothing() -> dict[str, str]:
    return {}


def server(path: Path) -> AdminServer:
    return AdminServer(AdminSettings(socket=str(path)), NoWorkers(), nothing, bytes)


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


def test_a_second_proxy_is_refused_and_the_first_ones_socket_stays(path: Path) -> None:
    async def both() -> None:
        first = server(path)
        assert "another process answers there" in refused(path)
        first.start()
        assert "another process answers there" in refused(path)
        await first.stop()

    asyncio.run(both())
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


def test_a_proxy_removes_only_the_socket_that_it_made(path: Path) -> None:
    async def replaced() -> None:
        ours = server(path)
        path.unlink()
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.bind(str(path))
            await ours.stop()
            assert path.is_socket()

    asyncio.run(replaced())


def test_it_is_for_this_user_only(path: Path) -> None:
    async def once() -> None:
        ours = server(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        await ours.stop()

    asyncio.run(once())


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    assert "No such file or directory" in refused(tmp_path / "nowhere" / "admin.sock")
