"""Memory that KV connectors take is asked of the node before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.plan.model import Plan
from pdserve.preflight.connector_memory import find_connector_memory
from pdserve.preflight.finding import Finding
from pdserve.system.host import MemoryFacts
from tests.plan.kit import aggregated, plan, recipe
from tests.plan.test_mooncake_store import GIB, with_store


def facts(available: float, shm: float = 64) -> MemoryFacts:
    return MemoryFacts(available=int(available * GIB), shm_free=int(shm * GIB), limit_free=None)


def findings(built: Plan, node: MemoryFacts, held: tuple[int, ...] = ()) -> list[Finding]:
    return list(find_connector_memory(built, "localhost", built.processes, node, held))


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
