"""A canary through a named pair, for who has the deployment's engine key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from tests.proxy.deployment import KEY, Deployment

OWNER = {"authorization": f"Bearer {KEY}"}


def canary(deployment: Deployment, asked: Mapping[str, Any] = {}, headers: Mapping[str, str] = OWNER) -> httpx.Response:
    pair = {"prefill": "prefill-0", "decode": "decode-0", "tokens": 40, "seconds": 60, **asked}
    return deployment.proxy.http.post("/canary", params=pair, headers=headers)


@pytest.mark.parametrize("protocol", ["mooncake", "nixl", "nixl-push"])
def test_it_goes_to_its_pair_whatever_their_state_is(deployment: Deployment, protocol: str) -> None:
    deployment.up(2, 2, control=True, nixl=protocol == "nixl", push=protocol == "nixl-push")
    deployment.proxy.push("prefill-1", "starting")
    deployment.proxy.push("decode-1", "draining")
    assert canary(deployment, {"prefill": "prefill-1", "decode": "decode-1"}).status_code == 200
    assert [decode.transferred() for decode in deployment.decodes] == [0, 40]
    assert [prefill.state()["delivered"] for prefill in deployment.prefills] == [0, 1]
    page = deployment.proxy.http.get("/metrics").text
    assert not [line for line in page.splitlines() if line.startswith("pdserve_proxy_requests_total") and "/v1" in line]


def test_a_prefill_that_starts_anew_is_asked_for_its_new_engine_id(deployment: Deployment) -> None:
    """Its restart was asked for, so that nobody called it dead."""
    deployment.up(control=True)
    assert canary(deployment).status_code == 200
    old = deployment.prefills[0]
    deployment.proxy.push("prefill-0", "draining")
    old.end()
    deployment.proxy.push("prefill-0", "starting")
    deployment.engine("prefill-0", "prefill", port=old.port, bootstrap=old.bootstrap)
    assert canary(deployment).status_code == 200
    assert deployment.decodes[0].state()["received"] == 2


def test_a_failed_one_is_tried_nowhere_else(deployment: Deployment) -> None:
    deployment.up(2, 2)
    deployment.decodes[0].script(kv_fails=True)
    answer = canary(deployment)
    assert answer.status_code == 500
    assert [fake.state()["received"] for fake in (deployment.prefills[1], deployment.decodes[0])] == [0, 1]


def test_one_that_is_late_is_given_up(deployment: Deployment) -> None:
    deployment.up()
    deployment.prefills[0].script(hold="prefill")
    assert canary(deployment, {"seconds": 0.2}).status_code == 504
    deployment.prefills[0].script(hold="")
    deployment.idle()


def test_one_that_is_not_possible_or_of_somebody_else_is_refused(deployment: Deployment) -> None:
    deployment.up()
    asked = [{"prefill": "decode-0"}, {"decode": "decode-7"}, {"tokens": 0}, {"seconds": "inf"}]
    assert [canary(deployment, what).status_code for what in asked] == [404, 404, 400, 400]
    strangers: list[dict[str, str]] = [{}, {"authorization": "Bearer other"}]
    assert [canary(deployment, headers=headers).status_code for headers in strangers] == [401, 401]
    assert [fake.state()["received"] for fake in deployment.fakes] == [0, 0]
