"""MultiConnector of a real prefill: Mooncake's transfers are on its /metrics, and what each of its children did."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdserve.plan.process import HttpProbe
from tests.launch.deployment import Deployment, pdserve, read_json

pytestmark = pytest.mark.real

PREFIX = "vllm:kv_connector_mc_"
PROMPT = [3 + 7 * position * position % 251 for position in range(700)]
OTHER = PROMPT[::-1]
"""No whole chunk of it is one of the first's."""
STORED = 512
"""Tokens of its whole chunks."""
WAIT_SECONDS = 120.0

Counts = dict[str, tuple[float, float]]
"""What is counted -> of Mooncake, of LMCache."""


def engine(tiny: Deployment, process: str = "prefill-0") -> str:
    probe = tiny.run.read_plan().process(process).probe
    assert isinstance(probe, HttpProbe)
    return f"http://{probe.host}:{probe.port}"


def metrics(tiny: Deployment, process: str = "prefill-0") -> str:
    return httpx.get(f"{engine(tiny, process)}/metrics", trust_env=False, timeout=60).text


def counts(tiny: Deployment) -> Counts:
    """Of the children of prefill's MultiConnector, the only engine of the only model."""
    samples: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(metrics(tiny)):
        for sample in family.samples:
            if sample.name.startswith(PREFIX) and not sample.name.endswith("_created"):
                assert (sample.labels["model_name"], sample.labels["engine"]) == ("tiny", "0")
                samples.setdefault(sample.name.removeprefix(PREFIX), {})[sample.labels["connector"]] = sample.value
    return {name: (child["MooncakeConnector"], child["LMCacheMPConnector"]) for name, child in samples.items()}


def complete(tiny: Deployment, prompt: list[int] = PROMPT) -> str:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    status, answer = tiny.post("/v1/completions", body)
    assert status == 200, answer
    return str(answer["choices"][0]["text"])


def until(what: str, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline, what


def grown(before: Counts, **by: tuple[float, float]) -> Counts:
    return {
        name: (values[0] + by.get(name, (0, 0))[0], values[1] + by.get(name, (0, 0))[1])
        for name, values in before.items()
    }


def test_each_child_is_counted_when_a_prompt_is_new_and_when_lmcache_has_it(tiny: Deployment) -> None:
    (lmcache,) = tiny.run.read_plan().lmcache
    status = f"{lmcache.http_url}/status"

    def l1() -> dict[str, int]:
        answer = httpx.get(status, trust_env=False, timeout=60).json()
        l1_manager: dict[str, int] = answer["storage_manager"]["l1_manager"]
        return l1_manager

    def stored() -> int:
        """Chunks that can be loaded; one that is still being written cannot."""
        objects = l1()
        return objects["total_object_count"] - objects["staging_object_count"]

    before, stored_before = counts(tiny), stored()
    assert set(before) == {"queries_total", "hits_total", "hit_tokens_total", "misses_total", "pending_loads"}
    text = complete(tiny)
    new = grown(before, queries_total=(1, 1), misses_total=(1, 1))
    until("the counts of a new prompt", lambda: counts(tiny) == new)
    until("the chunks are stored", lambda: stored() >= stored_before + 2)

    reset = f"{engine(tiny)}/reset_prefix_cache?reset_external=false"
    # Blocks that decode has fetched are free after the next step of the engine, which other requests bring.
    until(
        "the prefix cache is empty",
        lambda: (
            httpx.post(reset, trust_env=False, timeout=60).json()["success"]
            or tiny.post("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 1})[0] != 200
        ),
    )
    before = counts(tiny)
    assert complete(tiny) == text
    loaded = grown(before, queries_total=(1, 1), misses_total=(1, 0), hits_total=(0, 1), hit_tokens_total=(0, STORED))
    until("the counts of a reload", lambda: counts(tiny) == loaded)
    assert loaded["pending_loads"] == (0, 0)
    until("no lock is left", lambda: l1()["read_locked_count"] == 0)


def mooncake(tiny: Deployment, name: str, process: str = "prefill-0") -> float:
    """The total of one of Mooncake's series. It is there from the start."""
    families = text_string_to_metric_families(metrics(tiny, process))
    samples = [sample for family in families for sample in family.samples if sample.name == f"vllm:mooncake_{name}"]
    assert [(sample.labels["model_name"], sample.labels["engine"]) for sample in samples] == [("tiny", "0")]
    return float(samples[0].value)


def test_bytes_and_seconds_of_a_transfer_are_on_the_metrics_of_prefill(tiny: Deployment) -> None:
    """vllm 0.32 exports nothing of Mooncake; without a patch these statistics would end the API server."""
    assert "mooncake-prom-metrics" in tiny.run.read_plan().process("prefill-0").patches
    before = {name: mooncake(tiny, name) for name in ("bytes_transferred_sum", "xfer_time_seconds_sum")}
    complete(tiny, OTHER)
    until("the bytes and seconds of the transfer", lambda: all(mooncake(tiny, n) > v for n, v in before.items()))
    assert mooncake(tiny, "num_descriptors_count") == mooncake(tiny, "xfer_time_seconds_count") > 0
    assert mooncake(tiny, "num_failed_transfers_total") == 0
    received = ("bytes_transferred_count", "num_failed_recvs_total", "num_kv_expired_reqs_total")
    assert [mooncake(tiny, name, "decode-0") for name in received] == [0, 0, 0], "prefill writes"
    dropped = 'pdserve_patch_effects_total{effect="observations-dropped"'
    assert dropped not in metrics(tiny), "nothing of Mooncake is left to drop"
    complete(tiny, OTHER)
    status = read_json(pdserve("status", "--json")[1])
    assert (status["phase"], status["processes"]["prefill-0"]["phase"]) == ("ready", "ready")


def test_the_subclass_is_what_vllm_built_in_the_scheduler_and_the_worker(tiny: Deployment) -> None:
    name = "multiconnector-selection"
    assert name in tiny.run.read_plan().process("prefill-0").patches
    assert name not in tiny.run.read_plan().process("decode-0").patches, "it has one connector only"
    until(
        "both have counted",
        lambda: f'pdserve_patch_effects_total{{effect="instances",patch="{name}"}} 2.0' in metrics(tiny),
    )
