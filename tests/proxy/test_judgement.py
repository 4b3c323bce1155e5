"""Engines that fail and are healthy take nothing from those that answer, and nobody takes an engine from the others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.proxy.candidates import POLICIES, everywhere
from tests.proxy.deployment import Deployment, Fake

FAULTS: dict[str, dict[str, dict[str, object]]] = {
    "500": {"prefill": {"prefill_status": 500}, "decode": {"decode_status": 500}},
    "503": {"prefill": {"prefill_status": 503}, "decode": {"decode_status": 503}},
    "404": {"prefill": {"prefill_status": 404}, "decode": {"decode_status": 404}},
    "429": {"prefill": {"prefill_status": 429}, "decode": {"decode_status": 429}},
    "reset": {"prefill": {"cut": True}, "decode": {"cut": True}},
    "hang": {"prefill": {"hold": "prefill"}, "decode": {"hold": "first"}},
}
NONE = {"prefill_status": 0, "decode_status": 0, "cut": False, "hold": ""}
POOLS = {"2 of 3": (1, 0, 3, 2), "1 and 1 of 2": (2, 1, 2, 1), "2 of 4": (1, 0, 4, 2), "7 of 8": (1, 0, 8, 7)}
"""Prefills, bad ones of them; decodes, bad ones of them."""
LEARNT = 20
"""Requests that may fail until it is known who is bad."""
BACK_SECONDS = 15.0
MOMENTS = {"pdserve.pd.serve.trials.PATIENCE_SECONDS": 0.5, "pdserve.pd.serve.trials.CANARY_SECONDS": 1.0}
HEALTH = {"interval_seconds": 0.5}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Engines for all tests; each has a proxy of its own to some of them."""
    with Deployment(tmp_path_factory.mktemp("engines")) as deployment:
        deployment.prefills = [deployment.engine(f"prefill-{index}", "prefill") for index in range(2)]
        deployment.decodes = [deployment.engine(f"decode-{index}", "decode") for index in range(8)]
        yield deployment


@contextmanager
def proxy_to(engines: Deployment, prefills: int, decodes: int, path: Path, **config: Any) -> Iterator[Deployment]:
    with Deployment(path) as deployment:
        workers = [*engines.prefills[:prefills], *engines.decodes[:decodes]]
        health = config.pop("health", HEALTH)
        listed = [fake.config().model_dump() for fake in workers]
        deployment.up(0, 0, workers=listed, health=health, moments=MOMENTS, request_timeout_seconds=60, **config)
        try:
            yield deployment
        finally:
            for fake in workers:
                fake.script(**NONE)


def ask(deployment: Deployment, number: int, **more: Any) -> int:
    headers = {"x-session-id": f"session-{number % 5}"}
    body = {"model": "tiny", "prompt": f"{number % 7} {'word ' * (number % 11)}", "max_tokens": 3} | more
    return deployment.proxy.http.post("/v1/completions", json=body, headers=headers).status_code


def served(deployment: Deployment) -> list[Fake]:
    return deployment.fakes


def break_some(engines: Deployment, pool: str, fault: str) -> list[Fake]:
    _, bad_prefills, _, bad_decodes = POOLS[pool]
    bad = [*engines.prefills[:bad_prefills], *engines.decodes[:bad_decodes]]
    for fake in bad:
        fake.script(**FAULTS[fault][fake.role])
    return bad


def holds(engines: Deployment, pool: str, fault: str, path: Path, *, at_once: int, **config: Any) -> None:
    """What is promised, with these engines broken."""
    prefills, _, decodes, _ = POOLS[pool]
    with proxy_to(engines, prefills, decodes, path, **config) as deployment:
        bad = break_some(engines, pool, fault)
        with ThreadPoolExecutor(at_once) as clients:
            first = list(clients.map(lambda number: ask(deployment, number), range(LEARNT)))
            then = list(clients.map(lambda number: ask(deployment, number), range(100)))
        assert set(then) == {200}, (first, then)
        for fake in bad:
            fake.script(**NONE)
        before = {fake.name: len(answered(fake)) for fake in bad}
        deadline = time.monotonic() + BACK_SECONDS
        number = 0
        while any(len(answered(fake)) == before[fake.name] for fake in bad):
            assert time.monotonic() < deadline, "not back"
            with ThreadPoolExecutor(8) as clients:
                assert set(clients.map(lambda number: ask(deployment, number), range(number, number + 16))) == {200}
            number += 16


def answered(fake: Fake) -> list[str]:
    """Names of the clients' requests that it has had."""
    names = [request["headers"]["x-request-id"] for request in fake.requests()]
    return [name for name in names if not name.startswith(("withdraw-", "canary-"))]


@pytest.mark.parametrize("at_once", [1, 8])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("fault", ["500", "503", "reset", "hang"])
def test_matrix(engines: Deployment, tmp_path: Path, pool: str, fault: str, at_once: int) -> None:
    holds(engines, pool, fault, tmp_path, at_once=at_once)
