"""Memory, shared memory and limits that are asked of a node before anything starts."""

from __future__ import annotations

from pdserve.plan.model import LmcacheServer, Plan
from pdserve.preflight.facts import Limit
from pdserve.preflight.finding import Finding
from pdserve.preflight.resources import ENGINE_FILES, find_memlock, find_memory, find_open_files
from pdserve.system.host import MemoryFacts
from tests.plan import kit
from tests.plan.kit import LMCACHE, NIXL, aggregated, on_gpus, plan, recipe, with_lmcache
from tests.plan.test_kv_transfer import GIB, with_store
from tests.preflight.kit import UNLIMITED, facts, here
from tests.preflight.test_links import rdma
from tests.tables import each_row


def memory(
    built: Plan,
    available: float,
    shm: float = 64,
    held: tuple[int, ...] = (),
    gives_back: tuple[LmcacheServer, ...] = (),
) -> list[Finding]:
    """What is found of the engines' connectors; test_node_checks.py has LMCache's own servers."""
    node = MemoryFacts(available=int(available * GIB), shm_free=int(shm * GIB), limit_free=None)
    found = find_memory(built, "localhost", built.processes, node, gives_back=gives_back, held_by_us=held)
    return [finding for finding in found if "connectors" in finding.need or "offloading" in finding.need]


def test_nothing_is_asked_where_no_connector_takes_memory() -> None:
    assert memory(plan(recipe()), 0) == []
    built = plan(recipe(with_store()))
    replaced = (built.process("prefill-0").ports["http"],)
    assert memory(built, 0, held=replaced) == [], "an engine that is replaced gives back what it has"


@each_row("available, status", [(2.5, "ok"), (2.4, "failed")])
def test_a_store_needs_its_segment_and_buffer(available: float, status: str) -> None:
    (finding,) = memory(plan(recipe(with_store())), available)
    assert (finding.check, finding.status, finding.need) == ("memory", status, "2.5 GiB for the engines' KV connectors")
    assert (finding.where == "mooncake_store") == (status == "failed")


@each_row("shm, status", [(8, "ok"), (7, "failed")])
def test_offloading_on_cuda_is_in_shared_memory(shm: float, status: str) -> None:
    change = aggregated(connector={"kind": "offloading", "cpu_gib": 8})
    in_memory, shared = memory(plan(recipe(change, {"lmcache": None, "platform": "cuda"})), 100, shm)
    assert (in_memory.status, shared.check, shared.status) == ("ok", "shm", status)
    assert (shared.fix is None) == (status == "ok")


def beside_lmcache() -> Plan:
    """LMCache and an engine's offloading with 40 GiB each, both in /dev/shm."""
    prefill = {"kind": "multi", "of": [NIXL, LMCACHE]}
    decode = {"kind": "multi", "of": [NIXL, {"kind": "offloading", "cpu_gib": 40}]}
    section = with_lmcache(l1_size_gb=40, shm_name="kv", transfer_mode="engine_driven")
    roles = {"prefill": {"connector": prefill}, "decode": {"connector": decode}}
    return plan(recipe(on_gpus(), {"devices_per_node": 2}, section, roles))


@each_row("shm, status", [(80, "ok"), (79, "failed"), (50, "failed")])
def test_lmcache_and_offloading_need_the_sum_in_shared_memory(shm: float, status: str) -> None:
    in_memory, shared = memory(beside_lmcache(), 200, shm)
    assert (in_memory.status, shared.check, shared.status) == ("ok", "shm", status)
    assert shared.need == "40.0 GiB in /dev/shm for offloading, beside 40.0 GiB for LMCache"
    assert ("lmcache.l1_size_gb" in (shared.fix or "")) == (status == "failed")


def test_what_a_replaced_server_of_lmcache_holds_counts_as_free() -> None:
    built = beside_lmcache()
    assert [found.status for found in memory(built, 50, 50)] == ["failed", "failed"]
    assert [found.status for found in memory(built, 50, 50, gives_back=built.lmcache)] == ["ok", "ok"]


def limit(soft: int, hard: int | None = None) -> Limit:
    return Limit(soft=soft, hard=soft if hard is None else hard)


@each_row("locked, capable, status", [
    (UNLIMITED, False, "ok"),
    (limit(64 * 1024), False, "failed"),  # an image's
    (limit(64 * 1024), True, "ok"),
    (limit(8 << 20, 200 * GIB), False, "failed"),  # a hard one helps nobody
    (limit(16 * GIB), False, "warning"),
    (limit(200 * GIB), False, "ok"),
])  # fmt: skip
def test_locked_memory_for_rdma(locked: Limit, capable: bool, status: str) -> None:
    [finding] = find_memlock("here", here(rdma()).processes, facts(memlock=locked, ipc_lock=capable))
    assert finding.status == status
    assert (finding.fix is None) == (status == "ok")
    assert find_memlock("here", here().processes, facts(memlock=limit(1))) == [], "it does not matter over tcp"


@each_row("files, roles, status", [
    (UNLIMITED, ("prefill", "decode", "proxy"), "ok"),
    (limit(1024, ENGINE_FILES), ("prefill", "decode"), "ok"),
    (limit(256, ENGINE_FILES), ("proxy",), "ok"),
    (limit(1024, 2048), ("proxy",), "warning"),
    (limit(256, 512), ("proxy",), "failed"),
    (limit(256, ENGINE_FILES), ("lmcache",), "failed"),
    (limit(1024, ENGINE_FILES), ("lmcache",), "ok"),
    (limit(256, ENGINE_FILES), ("prefill",), "ok"),
    (limit(256, 512), ("prefill",), "failed"),
    (limit(4096), ("prefill",), "warning"),
])  # fmt: skip
def test_open_files(files: Limit, roles: tuple[str, ...], status: str) -> None:
    built = here(kit.with_lmcache())
    starting = [process for process in built.processes if process.role in roles]
    [finding] = find_open_files("here", starting, facts(open_files=files))
    assert finding.status == status
