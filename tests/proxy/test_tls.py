"""TLS towards clients and towards workers, with certificates made for the test."""

from __future__ import annotations

import datetime
import ipaddress
import json
import signal
import ssl
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from pdserve.pd.http.places import PROBE_PLACES
from pdserve.pd.serve.client_tls import _HANDSHAKES
from tests.proxy.deployment import MODEL, Deployment, open_links, over_socket
from tests.proxy.raw import SECONDS, RawClient, post

ANSWER = json.dumps({"choices": [{"index": 0, "text": "over TLS", "finish_reason": "length"}]}).encode()
BODY = {"model": MODEL, "prompt": "hi"}


@dataclass(frozen=True)
class Pair:
    certificate: Path
    key: Path


def made(folder: Path, name: str) -> Pair:
    """A certificate for 127.0.0.1 that signs itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pair = Pair(folder / f"{name}.pem", folder / f"{name}.key")
    pair.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    pair.key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return pair


@dataclass
class Engine:
    """Answers every request, to clients that show the right certificate."""

    port: int
    requests: list[str]
    """Paths of what was posted."""


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    own, clients = made(tmp_path, "engine"), made(tmp_path, "proxy")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(clients.certificate))
    context.load_cert_chain(own.certificate, own.key)
    context.verify_mode = ssl.CERT_REQUIRED
    fake = Engine(0, [])

    class Answering(BaseHTTPRequestHandler):
        def setup(self) -> None:
            self.request = context.wrap_socket(self.request, server_side=True)
            super().setup()

        def finish(self) -> None:
            super().finish()
            self.request.close()

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(ANSWER)))
            self.end_headers()
            self.wfile.write(ANSWER)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            fake.requests.append(self.path)
            self.do_GET()

        def log_message(self, *_: object) -> None:
            """The test says what came."""

    class Server(ThreadingHTTPServer):
        daemon_threads = False

        def handle_error(self, request: object, client_address: object) -> None:
            """Who does not show the right certificate is not served."""
            assert isinstance(sys.exception(), OSError)

    server = Server(("127.0.0.1", 0), Answering)
    fake.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield fake
    server.shutdown()
    thread.join()
    server.server_close()


def worker(engine: Engine) -> dict[str, str]:
    return {"name": "aggregated-0", "role": "aggregated", "url": f"https://127.0.0.1:{engine.port}"}


def up(deployment: Deployment, engine: Engine, **config: Any) -> None:
    deployment.up(0, 0, protocol="aggregated", workers=[worker(engine)], **config)


def test_workers_are_reached_with_our_own_certificate(deployment: Deployment, engine: Engine, tmp_path: Path) -> None:
    mutual = {
        "ca": str(tmp_path / "engine.pem"),
        "certificate": str(tmp_path / "proxy.pem"),
        "key": str(tmp_path / "proxy.key"),
    }
    up(deployment, engine, upstream_tls=mutual)
    answer = deployment.proxy.http.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.content) == (200, ANSWER)
    assert len(engine.requests) == 1


def test_a_worker_that_an_admin_adds_is_reached_the_same_way(
    deployment: Deployment, engine: Engine, tmp_path: Path
) -> None:
    settings = {
        "ca": str(tmp_path / "engine.pem"),
        "certificate": str(tmp_path / "proxy.pem"),
        "key": str(tmp_path / "proxy.key"),
    }
    socket = str(tmp_path / "admin.sock")
    deployment.up(0, 0, protocol="aggregated", workers=[], upstream_tls=settings, admin={"socket": socket})
    with over_socket(socket) as admin:
        assert admin.post("/workers", json=worker(engine)).status_code == 201
        while not admin.get("/workers").json()["workers"][0]["healthy"]:
            pass
    answer = deployment.proxy.http.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.content) == (200, ANSWER)


@pytest.mark.parametrize("missing", ["our certificate", "trust in theirs"])
def test_without_a_certificate_or_trust_nothing_is_sent(
    deployment: Deployment, engine: Engine, tmp_path: Path, missing: str
) -> None:
    settings = {"ca": str(tmp_path / "engine.pem")}
    if missing == "trust in theirs":
        settings = {"certificate": str(tmp_path / "proxy.pem"), "key": str(tmp_path / "proxy.key")}
    up(deployment, engine, upstream_tls=settings)
    answer = deployment.proxy.http.post("/v1/completions", json=BODY)
    assert answer.status_code == 502
    assert answer.json()["error"]["message"].startswith("aggregated-0 ")
    assert engine.requests == []


def test_clients_are_served_over_tls_only(deployment: Deployment, tmp_path: Path) -> None:
    pair = made(tmp_path, "front")
    deployment.up(tls={"certificate": str(pair.certificate), "key": str(pair.key)})
    url = f"https://127.0.0.1:{deployment.proxy.port}/v1/completions"
    context = ssl.create_default_context(cafile=str(pair.certificate))
    with httpx.Client(verify=context, trust_env=False) as client:
        assert client.post(url, json=BODY).status_code == 200
        with client.stream("POST", url, json=BODY | {"stream": True}) as answer:
            assert [line for line in answer.iter_lines() if line][-1] == "data: [DONE]"
    with httpx.Client(trust_env=False) as client, pytest.raises(httpx.ConnectError):
        client.post(url, json=BODY)
    with httpx.Client(trust_env=False) as client, pytest.raises(httpx.HTTPError):
        client.post(url.replace("https", "http"), json=BODY)
    assert deployment.prefills[0].state()["received"] == 2


def encrypted(deployment: Deployment, pair: Pair, **config: Any) -> Deployment:
    return deployment.up(tls={"certificate": str(pair.certificate), "key": str(pair.key)}, **config)


def test_clients_that_never_begin_the_handshake_are_counted_and_closed(deployment: Deployment, tmp_path: Path) -> None:
    encrypted(deployment, made(tmp_path, "front"), limits={"max_connections": 4, "header_seconds": 2})
    places = 4 + PROBE_PLACES
    with ExitStack() as stack:
        silent = [stack.enter_context(RawClient(deployment.proxy.port)) for _ in range(places)]
        # The one that came first makes room.
        assert shown(deployment) == "front"
        # Nobody has said anything: each ends, if not before then because of the limit of time.
        assert [client.ended() for client in silent] == [b""] * places


def test_handshakes_that_are_not_ended_do_not_keep_a_client_out(deployment: Deployment, tmp_path: Path) -> None:
    """There is a limit to how many there are at once, below that of connections."""
    encrypted(deployment, made(tmp_path, "front"))
    with ExitStack() as stack:
        for _ in range(2 * _HANDSHAKES):
            stack.enter_context(RawClient(deployment.proxy.port)).send(b"\x16\x03\x01\x02\x00\x01")
        assert shown(deployment) == "front"
        (member,) = deployment.proxy.members
        sockets = [link for link in open_links(member) if link.startswith("socket:")]
        assert len(sockets) < _HANDSHAKES + 64


def shown(deployment: Deployment) -> str:
    """The name in the certificate that a new client is shown."""
    pem = ssl.get_server_certificate(("127.0.0.1", deployment.proxy.port), timeout=SECONDS)
    (name,) = x509.load_pem_x509_certificate(pem.encode()).subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(name.value)


def test_a_handshake_outlives_a_rolling_restart(deployment: Deployment, tmp_path: Path) -> None:
    pair = made(tmp_path, "front")
    encrypted(deployment, pair)
    context = ssl.create_default_context(cafile=str(pair.certificate))
    answers, own = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(answers, own, server_hostname="127.0.0.1")
    with RawClient(deployment.proxy.port) as client:

        def receive(most: int = 65536) -> None:
            piece = client.socket.recv(most)
            assert piece, "the connection was cut"
            answers.write(piece)

        with suppress(ssl.SSLWantReadError):
            tls.do_handshake()
        client.send(own.read())
        # Its answer shows that the process that will retire has accepted this client.
        receive(1)
        deployment.proxy.process.send_signal(signal.SIGUSR2)
        deployment.proxy.until("draining")
        while own.pending == 0:
            receive()
            with suppress(ssl.SSLWantReadError):
                tls.do_handshake()
        tls.write(post("/v1/completions", BODY).replace(b"host: proxy", b"host: 127.0.0.1"))
        client.send(own.read())
        answer = b""
        while not answer:
            receive()
            with suppress(ssl.SSLWantReadError):
                answer = tls.read(65536)
    assert answer.startswith(b"HTTP/1.1 200 ")


def test_sighup_reads_the_certificate_again(deployment: Deployment, tmp_path: Path) -> None:
    pair, other, third = made(tmp_path, "first"), made(tmp_path, "second"), made(tmp_path, "third")
    encrypted(deployment, pair)
    assert shown(deployment) == "first"
    pair.certificate.write_bytes(other.certificate.read_bytes())
    pair.key.write_bytes(other.key.read_bytes())
    deployment.proxy.process.send_signal(signal.SIGHUP)
    deployment.proxy.until("the certificate was read again")
    assert shown(deployment) == "second"
    # The key of another one.
    pair.certificate.write_bytes(third.certificate.read_bytes())
    deployment.proxy.process.send_signal(signal.SIGHUP)
    deployment.proxy.until("the certificate stays as it was")
    assert shown(deployment) == "second"
