"""The admin's listener of a running proxy: workers come and go, keys and policies are read again."""

from __future__ import annotations

import json
import signal
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.proxy.deployment import MODEL, PLAIN, Deployment, open_links, over_socket
from tests.tables import each_row

TOKEN = "an-admin-token-of-32-characters!"
CLIENT = "a-client-key"


def key_line(name: str, key: str, **limits: int) -> str:
    return json.dumps({"name": name, "sha256": sha256(key.encode()).hexdigest(), **limits}) + "\n"


@contextmanager
def administered(deployment: Deployment, tmp_path: Path, interval_seconds: float) -> Iterator[httpx.Client]:
    """A 1P1D deployment with the admin on a unix socket, and a client of that. `interval_seconds`: between two looks at
    a worker."""
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "keys").write_text(key_line("team", CLIENT))
    path = tmp_path / "admin.sock"
    deployment.up(
        admin={"socket": str(path), "token_file": str(tmp_path / "token")},
        auth={"keys_file": str(tmp_path / "keys")},
        health={"interval_seconds": interval_seconds, "timeout_seconds": 30},
    )
    deployment.proxy.http.headers["authorization"] = f"Bearer {CLIENT}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with over_socket(path, authorization=f"Bearer {TOKEN}") as client:
        yield client


@pytest.fixture
def admin(deployment: Deployment, tmp_path: Path) -> Iterator[httpx.Client]:
    """A 1P1D deployment with the admin on a unix socket, and a client of that."""
    with administered(deployment, tmp_path, interval_seconds=0.1) as client:
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


def test_a_worker_that_comes_back_under_its_name_is_looked_at_at_once(deployment: Deployment, tmp_path: Path) -> None:
    """The look at the one before it is not over yet: it is due in an hour."""
    with administered(deployment, tmp_path, interval_seconds=3600) as admin:
        (decode,) = deployment.decodes
        admin.delete("/workers/decode-0")
        admin.post("/workers", json={"name": "decode-0", "role": "decode", "url": decode.url})
        until_ready(admin, "decode-0")
        assert deployment.complete().status_code == 200


def test_a_worker_is_not_what_another_one_of_its_name_was(admin: httpx.Client, deployment: Deployment) -> None:
    """A new process of the proxy hears what the others have heard: decode-0 was drained, and that one is gone."""
    extra = deployment.engine("decode-9", "decode")
    admin.post("/workers/decode-0/drain")
    admin.delete("/workers/decode-0")
    admin.post("/workers", json={"name": "decode-0", "role": "decode", "url": extra.url})
    until_ready(admin, "decode-0")
    deployment.proxy.process.send_signal(signal.SIGUSR2)
    # In whatever order: the one opens it while the other ends.
    deployment.proxy.until_each("the admin of this process is open", "the old proxy process 0 has ended")
    until_ready(admin, "decode-0")
    assert [worker["state"] for worker in admin.get("/workers").json()["workers"]] == ["ready", "ready"]
    assert deployment.complete().status_code == 200
    assert extra.state()["received"] == 1


@each_row(
    "body, status",
    [
        ({"name": "decode-0", "role": "decode", "url": "http://127.0.0.1:1"}, 409),
        ({"name": "other", "role": "aggregated", "url": "http://127.0.0.1:1"}, 409),
        ({"name": "other", "role": "decode", "url": "http://127.0.0.1:1/path"}, 400),
        ({"name": "other"}, 400),
        ({"name": "prefill-1", "role": "prefill", "url": "http://127.0.0.1:1"}, 409),
    ],
)
def test_what_is_no_new_worker_is_refused(admin: httpx.Client, body: dict[str, Any], status: int) -> None:
    assert admin.post("/workers", json=body).status_code == status
    assert names(admin.get("/workers")) == {"prefill-0", "decode-0"}


def test_a_prefill_without_its_bootstrap_server_is_refused(admin: httpx.Client) -> None:
    answer = admin.post("/workers", json={"name": "prefill-1", "role": "prefill", "url": "http://127.0.0.1:1"})
    assert answer.json()["error"]["message"] == "prefill-1 has no bootstrap_url, which Mooncake needs"


def test_no_request_passes_without_the_admins_token(admin: httpx.Client, deployment: Deployment) -> None:
    for token in (CLIENT, "x", TOKEN + "x"):
        assert admin.get("/workers", headers={"authorization": f"Bearer {token}"}).status_code == 401
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
    assert admin.get("/metrics", headers={"authorization": "Bearer x"}).status_code == 401


@pytest.mark.parametrize("how", ["admin", "SIGHUP"])
def test_keys_and_policies_are_read_again_while_a_stream_runs(
    admin: httpx.Client, deployment: Deployment, tmp_path: Path, how: str
) -> None:
    deployment.decodes[0].script(hold="token")
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 5, "stream": True}
    with deployment.proxy.begun("/v1/completions", body) as lines:
        (tmp_path / "keys").write_text(key_line("other", "another-key", max_requests=1))
        deployment.rewrite(routing={"decode": {"kind": "round_robin"}})
        if how == "admin":
            assert admin.post("/reload").json() == {"keys": "ok", "policies": "ok"}
        else:
            deployment.proxy.process.send_signal(signal.SIGHUP)
            deployment.proxy.until("1 API keys from")
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
