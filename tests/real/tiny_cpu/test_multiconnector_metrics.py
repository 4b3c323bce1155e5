"""MultiConnector of a real prefill: Mooncake's transfers are on its /metrics, and what each of its children did."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.launch.deployment import Deployment, pdserve, read_json
from tests.real.reached import Reached, new_prompt, until

pytestmark = pytest.mark.real

PREFIX = "vllm:kv_connector_mc_"
TOKENS, STORED = 700, 512
"""Of a prompt, and of its whole chunks."""

Counts = dict[str, tuple[float, float]]
"""What is counted -> of Mooncake, of LMCache."""


async def counts(reached: Reached) -> Counts:
    """Of the children of prefill's MultiConnector, the only engine of the only model."""
    samples: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(await reached.page("prefill-0")):
        for sample in family.samples:
            if sample.name.startswith(PREFIX) and not sample.name.endswith("_created"):
                assert (sample.labels["model_name"], sample.labels["engine"]) == ("tiny", "0")
                samples.setdefault(sample.name.removeprefix(PREFIX), {})[sample.labels["connector"]] = sample.value
    return {name: (child["MooncakeConnector"], child["LMCacheMPConnector"]) for name, child in samples.items()}


async def grown(reached: Reached, before: Counts, **by: tuple[float, float]) -> None:
    """Wait until each count has grown by so much, and the others have not."""
    wanted = {
        name: (values[0] + by.get(name, (0, 0))[0], values[1] + by.get(name, (0, 0))[1])
        for name, values in before.items()
    }

    async def grown() -> bool:
        return await counts(reached) == wanted

    await until(f"the counts are {wanted}", grown)


async def test_each_child_is_counted_when_a_prompt_is_new_and_when_lmcache_has_it(reached: Reached) -> None:
    prompt = new_prompt(TOKENS)
    before, stored_before = await counts(reached), await reached.stored()
    assert set(before) == {"queries_total", "hits_total", "hit_tokens_total", "misses_total", "pending_loads"}
    first = await reached.tokens(prompt)
    await grown(reached, before, queries_total=(1, 1), misses_total=(1, 1))

    async def stored() -> bool:
        return await reached.stored() >= stored_before + 2

    await until("the chunks are stored", stored)
    await reached.forget("prefill-0")
    before = await counts(reached)
    assert await reached.tokens(prompt) == first
    hits = {"hits_total": (0, 1), "hit_tokens_total": (0, STORED)}
    await grown(reached, before, queries_total=(1, 1), misses_total=(1, 0), **hits)
    assert (await counts(reached))["pending_loads"] == (0, 0)
    await until("no lock is left", reached.unlocked)


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
