"""Engines that fail and are healthy take nothing from those that answer, and nobody takes an engine from the others."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pdserve.pd.workers.judgement import Fault, Judgement
from tests.proxy.candidates import POLICIES, everywhere
from tests.proxy.deployment import KEY, ROUND_ROBIN, Deployment, Fake
from tests.proxy.test_failures import error_of
from tests.tables import each_row

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
MOST_WITHDRAWN = 20
"""Transfers that are withdrawn during a hundred requests, once it is known: those of canaries."""
PATIENCE = "pdserve.pd.relay.worker_trials.PATIENCE_SECONDS"
MOMENTS = {PATIENCE: 0.5, "pdserve.pd.relay.worker_trials.CANARY_SECONDS": 1.0}
HEALTH = {"interval_seconds": 0.5}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Engines for all tests; each has a proxy of its own to some of them."""
    with Deployment(tmp_path_factory.mktemp("engines")) as deployment:
        deployment.prefills = [deployment.engine(f"prefill-{index}", "prefill") for index in range(2)]
        deployment.decodes = [deployment.engine(f"decode-{index}", "decode") for index in range(8)]
        yield deployment


@contextmanager
def proxy_to(
    engines: Deployment, prefills: int, decodes: int, path: Path, *, patience: float = 0.5, **config: Any
) -> Iterator[Deployment]:
    moments = MOMENTS | {PATIENCE: patience}
    with Deployment(path) as deployment:
        workers = [*engines.prefills[:prefills], *engines.decodes[:decodes]]
        health = config.pop("health", HEALTH)
        listed = [fake.config().model_dump() for fake in workers]
        deployment.up(0, 0, workers=listed, health=health, moments=moments, request_timeout_seconds=60, **config)
        try:
            yield deployment
        finally:
            for fake in workers:
                fake.script(**NONE)


def ask(deployment: Deployment, number: int, **more: Any) -> int:
    headers = {"x-session-id": f"session-{number % 40}"}
    body = {"model": "tiny", "prompt": f"{number % 7} {'word ' * (number % 11)}", "max_tokens": 3} | more
    return deployment.proxy.http.post("/v1/completions", json=body, headers=headers).status_code


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
            withdrawn = withdrawals(engines)
            then = list(clients.map(lambda number: ask(deployment, number), range(100)))
        assert set(then) == {200}, (first, then)
        assert withdrawals(engines) - withdrawn <= MOST_WITHDRAWN
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


def withdrawals(engines: Deployment) -> int:
    return sum(name.startswith("withdraw-") for fake in engines.decodes for name in named(fake))


def answered(fake: Fake) -> list[str]:
    """Names of the clients' requests that it has had."""
    return [name for name in named(fake) if not name.startswith(("withdraw-", "canary-"))]


def named(fake: Fake) -> list[str]:
    return [request["headers"]["x-request-id"] for request in fake.requests()]


ROUTING = [*((policy, False) for policy in POLICIES), ("least_loaded", True)]
FAILS = ("500", "503", "reset", "hang", "503", "hang")
CASES = [
    (pool, fault, at_once, *routing)
    for pool, fault, at_once, routing in zip([*POOLS, *POOLS][:6], FAILS, (1, 8, 1, 8, 8, 1), ROUTING, strict=True)
]
"""Each pool, each fault, one at a time and eight; each policy, also with sessions."""


@pytest.mark.parametrize(("pool", "fault", "at_once", "policy", "affinity"), CASES)
def test_who_only_fails_takes_nothing_from_who_answers(
    engines: Deployment, tmp_path: Path, pool: str, fault: str, at_once: int, policy: str, affinity: bool
) -> None:
    routing = everywhere(policy, affinity=affinity).model_dump()
    holds(engines, pool, fault, tmp_path, at_once=at_once, routing=routing)


# --- the rule


def judged(*faults: Fault) -> Judgement:
    """At loop time 100."""
    judgement = Judgement(5, 10, set())
    for fault in faults:
        judgement.failed(fault, 100)
    return judgement


@each_row("faults", [("unreachable",), ("unavailable",), ("lost",), ("silent",), ("failed", "failed")])
def test_these_make_a_worker_doubtful_until_it_answers(faults: tuple[Fault, ...]) -> None:
    judgement = judged(*faults)
    assert judgement.doubtful
    judgement.answered(101)
    assert not judgement.doubtful


def test_one_canary_is_with_a_worker_at_a_time() -> None:
    judgement = judged("lost")
    assert [judgement.is_due(now) for now in (100.5, 101)] == [False, True]
    judgement.canary_begins(101)
    assert not judgement.is_due(1000)
    judgement.canary_ended()
    assert [judgement.is_due(now) for now in (102, 103)] == [False, True]


# --- poison


POISON: dict[str, dict[str, Any]] = {
    "500": {"poisonous": True},
    "400": {"stop": ["a"] * 5},
    "no such model": {"model": "other"},
}


@pytest.mark.parametrize(
    ("prefills", "decodes", "poison"),
    [(1, 1, "500"), (1, 3, "400"), (2, 2, "no such model")],
)
def test_poison_costs_no_innocent_request(
    engines: Deployment, tmp_path: Path, prefills: int, decodes: int, poison: str
) -> None:
    """Two clients send it as fast as they can beside four that send something else."""
    fakes = [*engines.prefills[:prefills], *engines.decodes[:decodes]]
    with proxy_to(engines, prefills, decodes, tmp_path) as deployment, ThreadPoolExecutor(6) as clients:
        for fake in fakes:
            fake.script(poison="poisonous")
        before = {fake.name: len(answered(fake)) for fake in fakes}
        innocent = [clients.submit(lambda: Counter(ask(deployment, number) for number in range(50))) for _ in range(4)]

        def send_poison() -> Counter[int]:
            return Counter(
                ask(deployment, 0, **POISON[poison])
                for _ in itertools.takewhile(lambda _: not all(one.done() for one in innocent), itertools.count())
            )

        poisoned = [clients.submit(send_poison) for _ in range(2)]
        assert sum((one.result() for one in innocent), Counter()) == {200: 200}
        assert sum((one.result() for one in poisoned), Counter()).keys() <= {400, 404, 500}
        assert all(len(answered(fake)) > before[fake.name] for fake in fakes)


# --- what a request has done


@pytest.mark.parametrize("kept", [False, True], ids=["new", "kept"])
def test_a_request_that_ends_engines_ends_two_at_most_and_is_named(deployment: Deployment, kept: bool) -> None:
    """Also over connections that are kept: what is lost there at once is sent again."""
    deployment.up(1, 4, decode={"lethal": "lethal"}, routing=everywhere("round_robin").model_dump())
    if kept:
        assert {ask(deployment, number) for number in range(8)} == {200}
    headers = {"x-request-id": "the-killer"}
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 2, "lethal": True}
    assert deployment.proxy.http.post("/v1/completions", json=body, headers=headers).status_code == 502
    deployment.proxy.until(r"the-killer: decode-\d closed the connection, as with another worker: not tried again")
    while sum(fake.process.poll() is not None for fake in deployment.decodes) < 2:
        pass
    assert {ask(deployment, number) for number in range(20)} == {200}
    assert sum(fake.process.poll() is None for fake in deployment.decodes) == 2


@pytest.mark.parametrize(("status", "lost"), [(404, 1), (429, 0)])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_one_engine_refuses_and_others_serve_is_tried_with_those(
    engines: Deployment, tmp_path: Path, role: str, status: int, lost: int
) -> None:
    """The first 404 in a row may be its client's own."""
    with proxy_to(engines, 2, 2, tmp_path, routing=everywhere("round_robin").model_dump()) as deployment:
        assert {ask(deployment, number) for number in range(8)} == {200}
        (engines.prefills if role == "prefill" else engines.decodes)[0].script(**{f"{role}_status": status})
        statuses: list[int] = [ask(deployment, number) for number in range(40)]
        assert statuses.count(status) <= lost
        assert set(statuses) <= {200, status}


# --- silence


def received(fakes: list[Fake]) -> int:
    return sum(len(answered(fake)) for fake in fakes)


@pytest.mark.parametrize(
    ("role", "nixl", "stream"),
    [("prefill", False, False), ("prefill", True, True), ("decode", False, True), ("decode", True, False)],
)
def test_an_engine_that_hangs_is_left_and_keeps_no_kv(
    deployment: Deployment, role: str, nixl: bool, stream: bool
) -> None:
    deployment.up(2, 2, nixl=nixl, moments=MOMENTS, health=HEALTH)
    hung = (deployment.prefills if role == "prefill" else deployment.decodes)[0]
    hung.script(**FAULTS["hang"][role])
    with ThreadPoolExecutor(8) as clients:
        assert set(clients.map(lambda number: ask(deployment, number, stream=stream), range(24))) == {200}
    left = received([hung])
    assert {ask(deployment, number, stream=stream) for number in range(10)} == {200}
    assert received([hung]) == left
    hung.script(**NONE)
    deployment.idle()


SLOW: dict[str, tuple[str, dict[str, object], dict[str, Any]]] = {
    "all prompts take long": ("prefill", {"prefill_seconds": 4}, {}),
    "a long prompt": ("prefill", {"prefill_seconds": 2.5}, {"prompt": "word " * 2000}),
    "an answer that is sent as a whole": ("decode", {"token_seconds": 0.25}, {"max_tokens": 10}),
    "a stream": ("decode", {"token_seconds": 0.25}, {"max_tokens": 10, "stream": True}),
}


@pytest.mark.parametrize("case", SLOW)
def test_an_engine_that_computes_for_long_is_not_left(engines: Deployment, tmp_path: Path, case: str) -> None:
    role, slow, more = SLOW[case]
    pool = (engines.prefills if role == "prefill" else engines.decodes)[:2]
    # Where both are slow, requests that come a second apart on a busy machine must not look as if one were silent.
    patience = 3.0 if case == "all prompts take long" else 0.5
    with proxy_to(engines, 2, 2, tmp_path, patience=patience) as deployment, ThreadPoolExecutor(4) as clients:
        for fake in pool if case == "all prompts take long" else pool[:1]:
            fake.script(**slow)
        before = received(pool)
        try:
            assert set(clients.map(lambda number: ask(deployment, number, **more), range(4))) == {200}
        finally:
            for fake in pool:
                fake.script(prefill_seconds=0, token_seconds=0)
        assert received(pool) == before + 4


# --- a request that crashes engines costs its own client an error, and the others nothing: no worker leaves routing,


POISONOUS = {"poisonous": True}
AT_ONCE = {"failures": 1, "open_seconds": 600}
"""A breaker that opens at the first failure and does not close."""


def open_breakers(deployment: Deployment) -> list[str]:
    return [name for name, worker in deployment.workers().items() if worker["breaker"] != "closed"]


def poisoned(fakes: list[Fake]) -> list[Fake]:
    for fake in fakes:
        fake.script(poison="poisonous")
    return fakes


def poison_received(fakes: list[Fake]) -> int:
    return sum("poisonous" in request["body"] for fake in fakes for request in fake.requests())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_fails_on_two_workers_blames_none(deployment: Deployment, role: str) -> None:
    deployment.up(3, 3, routing=ROUND_ROBIN, breaker=AT_ONCE)
    fakes = poisoned(deployment.prefills if role == "prefill" else deployment.decodes)
    for times in range(1, 4):
        answer = deployment.complete(**POISONOUS)
        assert (answer.status_code, error_of(answer)["message"]) == (500, "'str' object has no attribute 'get'")
        assert poison_received(fakes) == 2 * times
    assert open_breakers(deployment) == []
    assert {deployment.complete().status_code for _ in range(6)} == {200}
    deployment.idle()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_that_answers_others_is_not_left_alone(deployment: Deployment, role: str) -> None:
    """Only one of two fails with it, and the other one answers it: it is to blame, and of use all the same."""
    deployment.up(2, 2, routing=ROUND_ROBIN, breaker=AT_ONCE)
    fakes = deployment.prefills if role == "prefill" else deployment.decodes
    poisoned(fakes[:1])
    assert {deployment.complete().status_code for _ in range(4)} == {200}
    assert {deployment.complete(**POISONOUS).status_code for _ in range(6)} == {200}
    assert poison_received(fakes[:1]) > 1
    assert open_breakers(deployment) == []


@pytest.mark.parametrize("nixl", [False, True], ids=["mooncake", "nixl"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_closed_connection_costs_no_answer(deployment: Deployment, stream: bool, nixl: bool) -> None:
    """There is one worker of each role: nobody else could answer."""
    deployment.up(nixl=nixl, breaker=AT_ONCE, prefill={"stale": 1}, decode={"stale": 1})
    assert {deployment.complete(stream=stream).status_code for _ in range(6)} == {200}
    assert open_breakers(deployment) == []
    assert [fake.state()["received"] for fake in deployment.fakes] == [6, 6]
    deployment.idle()


def test_a_wrong_key_that_is_forwarded_is_its_clients_401(deployment: Deployment) -> None:
    deployment.up(breaker=AT_ONCE, auth={"client_authorization": "forward"})
    body = {"prompt": "hello", "max_tokens": 2}

    def ask(key: str) -> Any:
        return deployment.proxy.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})

    for _ in range(3):
        answer = ask("not the key")
        assert (answer.status_code, error_of(answer)["type"]) == (401, "UnauthorizedError")
        assert ask(KEY).status_code == 200
    assert open_breakers(deployment) == []


# --- what can be known is refused before any leg


def served(deployment: Deployment) -> None:
    """The proxy knows what its engines serve."""
    for _ in deployment.fakes:
        deployment.proxy.until(r"(prefill|decode)-0 serves tiny")


def test_what_every_engine_would_refuse_reaches_none(deployment: Deployment) -> None:
    deployment.up()
    served(deployment)
    for path, body, message in (
        ("/v1/chat/completions", {"messages": []}, "empty conversation"),
        ("/v1/messages", {"messages": [], "max_tokens": 3}, "empty conversation"),
        ("/v1/completions", {"prompt": [7] * 100_001}, "contains 100001 input tokens"),
    ):
        answer = deployment.proxy.http.post(path, json={"model": "tiny"} | body)
        assert (answer.status_code, message in answer.json()["error"]["message"]) == (400, True), path
    assert [fake.state()["received"] for fake in deployment.fakes] == [0, 0]


def test_an_unknown_model_is_asked_for_once_and_then_refused(deployment: Deployment) -> None:
    """Once, because an engine may have loaded an adapter since."""
    deployment.up(moments={"pdserve.pd.workers.models.ASK_AGAIN_SECONDS": 600})
    served(deployment)
    answers = [deployment.complete(model="other") for _ in range(3)]
    assert {answer.status_code for answer in answers} == {404}
    assert error_of(answers[-1]) == {
        "message": "The model `other` does not exist. Valid aliases: tiny.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }
    assert [fake.state()["received"] for fake in deployment.fakes] == [1, 1]

    # One of megabytes is refused by its beginning.
    error = error_of(deployment.complete(model='\u00e9"' * 60_000))
    assert (error["code"], error["type"]) == (404, "NotFoundError")
    assert error["message"].startswith('The model `\u00e9\\"')
    assert len(error["message"]) < 600


def test_a_request_that_names_no_model_is_served(deployment: Deployment) -> None:
    deployment.up()
    served(deployment)
    assert [deployment.complete([7] * 9, model=model).status_code for model in (None, "", "tiny")] == [200] * 3
