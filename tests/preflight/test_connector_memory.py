"""Memory that KV connectors take is asked of the node before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.plan.model import LmcacheServer, Plan
from pdserve.preflight.finding import Finding
from pdserve.preflight.resources import find_memory
from pdserve.system.host import MemoryFacts
from tests.plan.kit import LMCACHE, NIXL, aggregated, on_gpus, plan, recipe, with_lmcache
from tests.plan.test_kv_transfer import GIB, with_store


def facts(available: float, shm: float = 64) -> MemoryFacts:
    return MemoryFacts(available=int(available * GIB), shm_free=int(shm * GIB), limit_free=None)


def findings(
    built: Plan, node: MemoryFacts, held: tuple[int, ...] = (), gives_back: tuple[LmcacheServer, ...] = ()
) -> list[Finding]:
    found = find_memory(built, "localhost", built.processes, node, gives_back=gives_back, held_by_us=held)
    return [finding for finding in found if "connectors" in finding.need or "offloading" in finding.need]


def offloading(**role: Any) -> Plan:
    change = aggregated(connector={"kind": "offloading", "cpu_gib": 8}, **role)
    return plan(recipe(change, {"lmcache": None, "platform": "cuda"}))


def test_nothing_is_asked_where_no_connector_takes_memory() -> None:
    assert findings(plan(recipe()), facts(0)) == []


@pytest.mark.parametrize(("available", "status"), [(2.5, "ok"), (2.4, "failed")])
def test_a_store_needs_its_segment_and_buffer(available: float, status: str) -> None:
    (finding,) = findings(plan(recipe(with_store())), facts(available))
    assert (finding.check, finding.status, finding.need) == ("memory", status, "2.5 GiB for the engines' KV connectors")
    assert (finding.where == "mooncake_store") == (status == "failed")


def test_an_engine_that_is_replaced_gives_back_what_it_has() -> None:
    built = plan(recipe(with_store()))
    assert findings(built, facts(0), held=(built.process("prefill-0").ports["http"],)) == []


@pytest.mark.parametrize(("shm", "status"), [(8, "ok"), (7, "failed")])
def test_offloading_on_cuda_is_in_shared_memory(shm: float, status: str) -> None:
    memory, shared = findings(offloading(), facts(100, shm))
    assert (memory.status, shared.check, shared.status) == ("ok", "shm", status)
    assert (shared.fix is None) == (status == "ok")


def beside_lmcache() -> Plan:
    """LMCache and an engine's offloading with 40 GiB each, both in /dev/shm."""
    prefill = {"kind": "multi", "of": [NIXL, LMCACHE]}
    decode = {"kind": "multi", "of": [NIXL, {"kind": "offloading", "cpu_gib": 40}]}
    section = with_lmcache(l1_size_gb=40, shm_name="kv", transfer_mode="engine_driven")
    roles = {"prefill": {"connector": prefill}, "decode": {"connector": decode}}
    return plan(recipe(on_gpus(), {"devices_per_node": 2}, section, roles))


@pytest.mark.parametrize(("shm", "status"), [(80, "ok"), (79, "failed"), (50, "failed")])
def test_lmcache_and_offloading_need_the_sum_in_shared_memory(shm: float, status: str) -> None:
    memory, shared = findings(beside_lmcache(), facts(200, shm))
    assert (memory.status, shared.check, shared.status) == ("ok", "shm", status)
    assert shared.need == "40.0 GiB in /dev/shm for offloading, beside 40.0 GiB for LMCache"
    assert ("lmcache.l1_size_gb" in (shared.fix or "")) == (status == "failed")


def test_what_a_replaced_server_of_lmcache_holds_counts_as_free() -> None:
    built = beside_lmcache()
    assert [found.status for found in findings(built, facts(50, 50))] == ["failed", "failed"]
    assert [found.status for found in findings(built, facts(50, 50), gives_back=built.lmcache)] == ["ok", "ok"]


@pytest.mark.parametrize(("available", "status"), [(5, "ok"), (4.9, "failed")])
def test_the_kv_that_lmcache_maps_on_a_cpu_counts_too(available: float, status: str) -> None:
    """2.5 GiB of a store's client, 1 of L1, and 1.5 that the servers of such engines would map."""
    built = plan(recipe(with_store()))
    server = plan(recipe(with_lmcache())).lmcache[0]
    mapped = server.model_copy(update={"kv_bytes_on_host": int(1.5 * GIB), "process": built.processes[0].name})
    (memory,) = findings(built.model_copy(update={"lmcache": (mapped,)}), facts(available))
    assert memory.status == status
    assert memory.need == "2.5 GiB for the engines' KV connectors, beside 2.5 GiB for LMCache"
