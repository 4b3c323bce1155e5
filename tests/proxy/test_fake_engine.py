"""The fake engine behaves like vLLM where the tests rely on it."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from pdserve.system import procfs
from tests.proxy.deployment import KEY, PLAIN, Deployment, Fake

TRANSFER = "xfer-1"


def ask(fake: Fake, params: dict[str, Any] | None = None, **more: Any) -> httpx.Response:
    body = {"prompt": "hello world", "max_tokens": 4, "kv_transfer_params": params} | more
    return fake.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {KEY}"})


def prefill(fake: Fake, **more: Any) -> httpx.Response:
    return ask(fake, {"do_remote_decode": True, "transfer_id": TRANSFER}, **({"max_tokens": 1} | more))


def from_prefill(fake: Fake, **other: Any) -> dict[str, Any]:
    address = f"http://127.0.0.1:{fake.bootstrap}"
    engine_id = httpx.get(f"{address}/query", **PLAIN).json()["0"]["engine_id"]
    params = {"do_remote_prefill": True, "transfer_id": TRANSFER, "remote_bootstrap_addr": address}
    return params | {"remote_engine_id": engine_id} | other


def test_kv_is_kept_until_it_is_fetched(deployment: Deployment) -> None:
    p, d = deployment.engine("p", "prefill"), deployment.engine("d", "decode")
    prefill(p)
    assert p.state()["held"] == 1
    local = ask(d).json()["choices"]
    assert ask(d, from_prefill(p)).json()["choices"] == local
    assert p.state()["held"] == 0


def test_decode_may_come_first(deployment: Deployment) -> None:
    p, d = deployment.engine("p", "prefill"), deployment.engine("d", "decode")
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(ask, d, from_prefill(p))
        d.wait(waiting=1)
        prefill(p)
        assert answer.result().status_code == 200


def test_kv_of_a_prefill_that_stops_is_kept(deployment: Deployment) -> None:
    p = deployment.engine("p", "prefill", eos=1)
    prefill(p)
    assert p.state()["held"] == 1


def test_a_decode_that_asks_for_an_unknown_engine_fails(deployment: Deployment) -> None:
    p, d = deployment.engine("p", "prefill"), deployment.engine("d", "decode")
    prefill(p)
    assert ask(d, from_prefill(p, remote_engine_id="old")).status_code == 500


def test_a_decode_without_all_parameters_dies_of_the_abort(deployment: Deployment) -> None:
    d = deployment.engine("d", "decode", exit_code=3)
    with pytest.raises(httpx.ReadTimeout):
        d.http.post(
            "/v1/completions",
            json={"prompt": "a", "kv_transfer_params": {"do_remote_prefill": True, "transfer_id": TRANSFER}},
            headers={"authorization": f"Bearer {KEY}"},
            timeout=0.3,
        )
    assert d.process.wait() == 3


@pytest.mark.parametrize(("role", "flag"), [("prefill", "do_remote_prefill"), ("decode", "do_remote_decode")])
def test_the_wrong_leg_kills_the_engine(deployment: Deployment, role: str, flag: str) -> None:
    fake = deployment.engine("x", role)
    with pytest.raises(httpx.RemoteProtocolError):
        ask(fake, {flag: True, "transfer_id": TRANSFER})
    assert fake.process.wait() == 1


def test_the_key_guards_v1_only(deployment: Deployment) -> None:
    fake = deployment.engine("d", "decode")
    assert fake.http.get("/v1/models").status_code == 401
    assert fake.http.get("/health").status_code == fake.http.get("/metrics").status_code == 200


def test_a_prompt_seen_before_is_cached_in_whole_blocks_until_reset(deployment: Deployment) -> None:
    fake = deployment.engine("d", "aggregated")
    cached = []
    for reset in (False, False, True):
        if reset:
            fake.http.post("/reset_prefix_cache")
        cached.append(ask(fake, prompt="x" * 40).json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 32, 0]


@pytest.mark.parametrize(("at", "code"), [("import", 1), ("load", 4)])
def test_it_dies_as_configured_with_its_last_words(deployment: Deployment, at: str, code: int) -> None:
    with pytest.raises(AssertionError, match=f"ended with {code}.*(?s:.*)out of memory\n"):
        deployment.engine("x", "aggregated", die_at=at, exit_code=code, last_lines=r"first\nout of memory")


def test_its_child_outlives_it_and_ignores_term(deployment: Deployment) -> None:
    fake = deployment.engine("x", "aggregated", child=1)
    if not any("EngineCore started" in line for line in fake.log):
        fake.until("EngineCore started")  # it ignores the signal from then on
    (child,) = procfs.descendants(fake.process.pid)
    try:
        fake.end(signal.SIGKILL)
        os.kill(child, signal.SIGTERM)
        assert "VLLM::EngineCore" in procfs.command(child)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_term_stops_it_unless_it_is_to_be_ignored(deployment: Deployment) -> None:
    assert deployment.engine("a", "aggregated").end(signal.SIGTERM) == 0
    stubborn = deployment.engine("b", "aggregated", ignore_term=1)
    stubborn.process.send_signal(signal.SIGTERM)
    assert stubborn.http.get("/health").status_code == 200
