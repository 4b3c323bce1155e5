"""The admin: only with the token, and only what it is asked to do; the file of its unix socket; a running proxy whose
workers come and go, and whose keys and policies are read again.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.errors import RecipeError, StartError
from pdserve.pd.config.settings import AdminSettings
from pdserve.pd.limits import keys
from pdserve.pd.serve.admin import AdminServer
from tests.proxy.deployment import MODEL, PLAIN, Deployment, keys_file, open_links, over_socket
from tests.tables import each_row

TOKEN = "an-admin-token-of-32-characters!"


@each_row(
    "content, what",
    [(b"", "fewer than 16"), (b"short\n", "fewer than 16"), (b"\xff", "UTF-8"), (None, "No such file")],
)
def test_a_token_that_protects_nothing_is_refused(tmp_path: Path, content: bytes | None, what: str) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RecipeError, match=what):
        keys.read_token(path)


# --- the file of the admin's unix socket: whose it may replace, and which it removes


def server(path: Path) -> AdminServer:
    nobody_asks: Any = None
    return AdminServer(AdminSettings(socket=str(path)), nobody_asks, nobody_asks, bytes)


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
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
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


# --- the listener of a running proxy


CLIENT = "a-client-key"


@pytest.fixture
def admin(deployment: Deployment, tmp_path: Path) -> Iterator[httpx.Client]:
    """A 1P1D deployment with the admin on a unix socket, and a client of that."""
    (tmp_path / "token").write_text(TOKEN)
    path = tmp_path / "admin.sock"
    deployment.up(
        admin={"socket": str(path), "token_file": str(tmp_path / "token")},
        auth=keys_file(tmp_path, ("team", CLIENT)),
        health={"interval_seconds": 0.1, "timeout_seconds": 30},
    )
    deployment.proxy.http.headers["authorization"] = f"Bearer {CLIENT}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with over_socket(path, authorization=f"Bearer {TOKEN}") as client:
        yield client


def names(answer: httpx.Response) -> set[str]:
    return {worker["name"] for worker in answer.json()["workers"]}


def until_ready(admin: httpx.Client, name: str) -> None:
    while not any(worker["name"] == name and worker["healthy"] for worker in admin.get("/workers").json()["workers"]):
        pass


def test_a_worker_is_added_and_serves_once_its_check_passes(admin: httpx.Client, deployment: Deployment) -> None:
    extra = deployment.engine("decode-9", "decode")
    answer = admin.post("/workers", json={"name": "decode-9", "role": "decode", "url": extra.url})
    assert (answer.status_code, names(answer)) == (201, {"prefill-0", "decode-0", "decode-9"})
    until_ready(admin, "decode-9")
    admin.post("/workers/decode-0/drain")
    assert deployment.complete().status_code == 200
    assert extra.state()["received"] == 1
    assert deployment.decodes[0].state()["received"] == 0


def test_a_removed_worker_is_gone_and_other_streams_go_on(admin: httpx.Client, deployment: Deployment) -> None:
    extra = deployment.engine("decode-9", "decode")
    admin.post("/workers", json={"name": "decode-9", "role": "decode", "url": extra.url})
    until_ready(admin, "decode-9")
    admin.post("/workers/decode-9/drain")
    deployment.decodes[0].script(hold="token")
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 5, "stream": True}
    with deployment.proxy.begun("/v1/completions", body) as lines:
        assert names(admin.delete("/workers/decode-9")) == {"prefill-0", "decode-0"}
        deployment.decodes[0].script(hold="")
        assert [*lines][-1] == "data: [DONE]"
    assert admin.delete("/workers/decode-9").status_code == 404
    assert admin.post("/workers/decode-9/drain").status_code == 404


THERE = "http://127.0.0.1:1"


@each_row(
    "change, status",
    [
        ({"name": "decode-0", "url": THERE}, 409),
        ({"role": "aggregated"}, 409),
        ({"role": "prefill"}, 409),
        ({"role": "router"}, 400),
        ({"name": ""}, 400),
        ({"name": "a\nb"}, 400),
        ({"name": "n" * 65}, 400),
        ({"url": "ftp://h:1"}, 400),
        ({"url": "http://h"}, 400),
        ({"url": "http://:80"}, 400),
        ({"url": "http://h:99999"}, 400),
        ({"url": "http://user:pw@h:1"}, 400),
        ({"url": "http://h:1/v1"}, 400),
        ({"url": "http://h:1?x"}, 400),
        ({"bootstrap_url": "tcp://h:1"}, 400),
        ({"kv_events_url": "http://h:1"}, 400),
        ({"surprise": 1}, 400),
        ({"url": 7}, 400),
    ],
)
def test_what_is_no_new_worker_is_refused(admin: httpx.Client, change: dict[str, Any], status: int) -> None:
    worker = {"name": "other", "role": "decode", "url": THERE} | change
    assert admin.post("/workers", json=worker).status_code == status
    assert names(admin.get("/workers")) == {"prefill-0", "decode-0"}


@each_row("body", [b"", b"{", b"[]", b"null", b"\xff"])
def test_a_body_that_is_no_json_object_is_400(admin: httpx.Client, body: bytes) -> None:
    assert admin.post("/workers", content=body).status_code == 400


@each_row(
    "header",
    [b"", b"Bearer", b"Bearer \xff\xfe", f"Basic {TOKEN}".encode(), TOKEN.encode()]
    + [f"Bearer {wrong}".encode() for wrong in (CLIENT, "x", TOKEN + "x", TOKEN[:-1])],
)
def test_without_the_admins_token_nothing_is_shown_and_nothing_is_done(admin: httpx.Client, header: bytes) -> None:
    for method, path in (
        ("GET", "/workers"),
        ("POST", "/workers"),
        ("POST", "/workers/decode-0/drain"),
        ("DELETE", "/workers/decode-0"),
        ("POST", "/reload"),
        ("GET", "/metrics"),
    ):
        answer = admin.request(method, path, headers={b"authorization": header})
        assert (answer.status_code, answer.json()["error"]["code"], "decode-0" in answer.text) == (401, 401, False)
    assert [worker["state"] for worker in admin.get("/workers").json()["workers"]] == ["ready", "ready"]


def test_the_clients_port_is_no_admin(admin: httpx.Client, deployment: Deployment) -> None:
    assert deployment.proxy.http.post("/workers", json={}).status_code == 405
    assert deployment.proxy.http.delete("/workers/decode-0").status_code == 404


@pytest.fixture
def port(deployment: Deployment) -> int:
    """A 1P1D deployment with the admin on a port and no token."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
    deployment.up(admin={"port": port})
    return port


@each_row("headers", [{"origin": "https://evil.example"}, {"host": "evil.example"}, {"origin": "null"}])
def test_a_page_of_another_site_is_no_admin(port: int, headers: dict[str, str]) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", **PLAIN) as client:
        assert client.get("/workers").status_code == 200
        worker = {"name": "theirs", "role": "decode", "url": "http://127.0.0.1:1"}
        answer = client.post("/workers", content=json.dumps(worker), headers=headers | {"content-type": "text/plain"})
        assert (answer.status_code, "no token" in answer.text) == (403, True)
        assert names(client.get("/workers")) == {"prefill-0", "decode-0"}


def test_idle_connections_to_the_admin_are_few(deployment: Deployment, port: int) -> None:
    with ExitStack() as stack:
        for _ in range(200):
            half = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=90))
            half.sendall(b"GET /workers HT")
        # All of them have been accepted before this one.
        assert httpx.get(f"http://127.0.0.1:{port}/workers", **PLAIN).status_code == 200
        (member,) = deployment.proxy.members
        sockets = [link for link in open_links(member) if link.startswith("socket:")]
        assert len(sockets) < 100


def test_only_the_admin_sees_the_names_of_keys_in_the_figures(admin: httpx.Client, deployment: Deployment) -> None:
    assert deployment.complete().status_code == 200
    # With a client's key too: it is not to know the others.
    for headers in ({}, {"authorization": f"Bearer {CLIENT}"}):
        page = httpx.get(f"{deployment.proxy.http.base_url}/metrics", headers=headers, **PLAIN)
        assert page.status_code == 200
        assert "pdserve_proxy_requests_total{" in page.text
        assert "team" not in page.text
        assert 'key="' not in page.text
    assert 'pdserve_proxy_key_requests{key="team"} 0.0' in admin.get("/metrics").text


@pytest.mark.parametrize("how", ["admin", "SIGHUP"])
def test_keys_and_policies_are_read_again_while_a_stream_runs(
    admin: httpx.Client, deployment: Deployment, tmp_path: Path, how: str
) -> None:
    deployment.decodes[0].script(hold="token")
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 5, "stream": True}
    with deployment.proxy.begun("/v1/completions", body) as lines:
        keys_file(tmp_path, ("other", "another-key"))
        deployment.rewrite(routing={"decode": {"kind": "round_robin"}})
        if how == "admin":
            assert admin.post("/reload").json() == {"keys": "ok", "policies": "ok"}
        else:
            deployment.proxy.process.send_signal(signal.SIGHUP)
            deployment.proxy.until("proxy process 0 has read its configuration again")
        deployment.decodes[0].script(hold="")
        assert [*lines][-1] == "data: [DONE]"
    assert deployment.complete().status_code == 401
    deployment.proxy.http.headers["authorization"] = "Bearer another-key"
    assert deployment.complete().status_code == 200
    page = deployment.proxy.http.get("/metrics").text
    assert 'routing_decisions_total{policy="round_robin",role="decode",why="turn"} 1.0' in page


def test_what_cannot_be_read_stays_as_it_was(admin: httpx.Client, deployment: Deployment, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("nonsense\n")
    (deployment.folder / "proxy.json").write_text("{}")
    answer = admin.post("/reload").json()
    assert "not usable" in answer["keys"]
    assert "not usable" in answer["policies"]
    assert deployment.complete().status_code == 200
