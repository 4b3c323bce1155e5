"""What `verify` asks of vllm-router. The router itself is proven in tests/launch/test_vllm_router.py."""

from __future__ import annotations

import pytest

from tests.verify.deployment import Deployment

pytestmark = pytest.mark.process


def test_a_router_that_is_not_ready_is_sent_nothing(deployment: Deployment) -> None:
    """pdserve's own proxy has no /readiness, which is where the router says that it has workers."""
    report = deployment.up(proxy_kind="vllm-router", cached=False).verify()
    endpoints, *rest = report.proofs
    assert endpoints.status == "failed"
    assert "/readiness): HTTP 404" in endpoints.reason
    assert {proof.status for proof in rest} == {"not-proven"}
    assert deployment.engines["prefill-0"].requests() == []
