"""MultiConnector of a real prefill: Mooncake's transfers are on its /metrics, and what each of its children did; how it
is counted is the matter of tests/upstream/test_metrics.py."""

from __future__ import annotations

import re

import pytest

from tests.launch.deployment import Deployment, pdserve, read_json
from tests.real.reached import Reached, new_prompt, until

pytestmark = pytest.mark.real

TOKENS = 700


async def test_bytes_and_seconds_of_a_transfer_are_on_the_metrics_of_prefill(
    tiny: Deployment, reached: Reached
) -> None:
    """vllm 0.32 exports nothing of Mooncake; without a patch these statistics would end the API server."""

    async def mooncake(name: str, process: str = "prefill-0") -> float:
        return await reached.figure(process, f"vllm:mooncake_{name}")

    assert "mooncake-prom-metrics" in tiny.run.read_plan().process("prefill-0").patches
    names = ("bytes_transferred_sum", "xfer_time_seconds_sum")
    before = {name: await mooncake(name) for name in names}
    failed = await mooncake("num_failed_transfers_total")
    await reached.tokens(new_prompt(TOKENS))

    async def shown() -> bool:
        return all([await mooncake(name) > before[name] for name in names])

    await until("the bytes and seconds of the transfer", shown)
    assert await mooncake("num_descriptors_count") == await mooncake("xfer_time_seconds_count") > 0
    assert await mooncake("num_failed_transfers_total") == failed
    assert await mooncake("bytes_transferred_count", "decode-0") == 0, "prefill writes"
    page = await reached.page("prefill-0")
    for child in ("MooncakeConnector", "LMCacheMPConnector"):
        assert re.search(rf'^vllm:kv_connector_mc_queries_total{{.*connector="{child}".*}} [1-9]', page, re.MULTILINE)
    assert 'pdserve_patch_effects_total{effect="observations-dropped"' not in page, "nothing is left to drop"
    await reached.tokens(new_prompt(TOKENS))
    status = read_json(pdserve("status", "--json")[1])
    assert (status["phase"], status["processes"]["prefill-0"]["phase"]) == ("ready", "ready")


async def test_the_subclass_is_what_vllm_built_in_the_scheduler_and_the_worker(
    tiny: Deployment, reached: Reached
) -> None:
    name = "multiconnector-selection"
    assert name in tiny.run.read_plan().process("prefill-0").patches
    assert name not in tiny.run.read_plan().process("decode-0").patches, "it has one connector only"
    line = f'pdserve_patch_effects_total{{effect="instances",patch="{name}"}} 2.0'

    async def counted() -> bool:
        await reached.tokens("one two", 1)  # what an engine has sent it reports with its next step
        return line in await reached.page("prefill-0")

    await until("both have counted", counted)
