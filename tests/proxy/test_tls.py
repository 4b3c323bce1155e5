"""TLS towards clients and towards workers, with certificates made for the test."""

from __future__ import annotations

import datetime
import ipaddress
import signal
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
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
from tests.proxy.deployment import MODEL, Deployment, open_links
from tests.proxy.raw import ANSWER, SECONDS, RawClient, RawEngine

FILES = ("engine.pem", "proxy.pem", "proxy.key")
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


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[RawEngine]:
    """It answers clients that show the right certificate."""
    own, clients = made(tmp_path, "engine"), made(tmp_path, "proxy")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(clients.certificate))
    context.load_cert_chain(own.certificate, own.key)
    context.verify_mode = ssl.CERT_REQUIRED
    engine = RawEngine(tls=context)
    yield engine
    engine.close()


def mutual(folder: Path) -> dict[str, str]:
    """The settings of a proxy that trusts that engine, and has what it asks for."""
    return {name: str(folder / file) for name, file in zip(("ca", "certificate", "key"), FILES, strict=True)}


def worker(engine: RawEngine) -> dict[str, str]:
    return {"name": "aggregated-0", "role": "aggregated", "url": engine.url}


def up(deployment: Deployment, engine: RawEngine, **config: Any) -> None:
    deployment.up(0, 0, protocol="aggregated", workers=[worker(engine)], **config)


def test_workers_are_reached_with_a_certificate(deployment: Deployment, engine: RawEngine, tmp_path: Path) -> None:
    up(deployment, engine, upstream_tls=mutual(tmp_path))
    answer = deployment.proxy.http.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.content) == (200, ANSWER)
    assert len(engine.seen) == 1


@pytest.mark.parametrize("missing", ["our certificate", "trust in theirs"])
def test_without_a_certificate_or_trust_nothing_is_sent(
    deployment: Deployment, engine: RawEngine, tmp_path: Path, missing: str
) -> None:
    left = {"ca"} if missing == "our certificate" else {"certificate", "key"}
    settings = {name: file for name, file in mutual(tmp_path).items() if name in left}
    up(deployment, engine, upstream_tls=settings)
    answer = deployment.proxy.http.post("/v1/completions", json=BODY)
    assert answer.status_code == 502
    assert answer.json()["error"]["message"].startswith("aggregated-0 ")
    assert engine.seen == []


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
