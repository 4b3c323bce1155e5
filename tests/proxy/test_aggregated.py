"""Without the split each engine answers alone; what prefill/decode must refuse is possible here."""

from __future__ import annotations

from tests.proxy.deployment import MODEL, Deployment


def test_lists_and_n_are_answered_by_one_engine(deployment: Deployment) -> None:
    deployment.up(aggregated=1)
    assert len(deployment.complete(["a", "b"], n=2).json()["choices"]) == 4


def test_all_engines_are_used_and_transfer_parameters_stripped(deployment: Deployment) -> None:
    deployment.up(aggregated=2)
    for _ in range(4):
        assert deployment.complete(kv_transfer_params={"do_remote_prefill": True}).status_code == 200
    for fake in deployment.aggregated:
        assert [request["body"].get("kv_transfer_params") for request in fake.requests()] == [None, None]


def test_another_engine_takes_over_from_a_dead_one(deployment: Deployment) -> None:
    deployment.up(aggregated=2)
    deployment.aggregated[0].end()
    assert [deployment.complete().status_code for _ in range(3)] == [200, 200, 200]


def test_a_client_that_leaves_ends_its_request(deployment: Deployment) -> None:
    deployment.up(aggregated=1)
    (engine,) = deployment.aggregated
    engine.script(hold="token")
    with deployment.proxy.open("/v1/completions", {"model": MODEL, "prompt": "hi", "stream": True}):
        engine.wait(running=1)
    engine.wait(aborted=1, running=0)


def test_streams_and_readiness(deployment: Deployment) -> None:
    deployment.up(aggregated=1)
    assert deployment.complete(stream=True).text.endswith("data: [DONE]\n\n")
    assert deployment.proxy.http.get("/ready").json()["empty_pools"] == []
