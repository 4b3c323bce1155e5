"""Caches are emptied before each point of a sweep; what cannot be emptied is named, and costs a start."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from pdserve.plan.model import Plan
from pdserve.recipe.model import Recipe
from pdserve.sweep import caches as module
from pdserve.sweep.caches import (
    EMPTIED,
    LASTS,
    NEW,
    RESET_IS_OFF,
    ROUTER,
    empty,
    find_full_cache,
    kept_until_start,
    new_caches,
)
from tests.bench.evidence import plan
from tests.launch.deployment import pdserve, recipe
from tests.recipe.kit import AGGREGATED, CPU, GPU, load
from tests.sweep.kit import records, sweep_file
from tests.tables import each_row
from tests.verify.deployment import asked


@dataclass
class Caches:
    """Of all engines and LMCache servers. Chunks that are locked stay until `locked` clearings were asked for."""

    objects: int = 40
    locked: int = 0
    busy: int = 0
    """So many resets of an engine do not work: some of its blocks are in use."""
    status: int = 200
    """Of an answer to a clearing."""
    cleared: list[str] = field(default_factory=list)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == "/metrics":
            return httpx.Response(200, text="")
        if path == "/status":
            return httpx.Response(200, json=self._state())
        self.cleared.append(path)
        if path == "/reset_prefix_cache":
            assert request.url.params["reset_external"] == "false"
            self.busy -= 1
            return httpx.Response(200, json={"success": self.busy < 0})
        if path == "/cache/clear":
            assert "authorization" not in request.headers, "LMCache is no engine: it does not get their key"
            self.locked -= 1
            if self.status == 200 and self.locked < 0:
                self.objects = 0
            return httpx.Response(self.status, json={})
        body = json.loads(request.content)
        choice = {"token_ids": [7] * body["max_tokens"]}
        return httpx.Response(200, json={"choices": [choice], "usage": {"prompt_tokens": len(body["prompt"])}})

    def _state(self) -> Mapping[str, object]:
        l1 = {"total_object_count": self.objects, "memory_used_bytes": 1, "memory_total_bytes": 2}
        return {"is_healthy": True, "storage_manager": {"l1_manager": l1}}


def emptied(
    caches: Caches, *, endpoint: bool = True, of: Plan | None = None, kept: Mapping[str, str] | None = None
) -> Mapping[str, str]:
    with pytest.MonkeyPatch.context() as patched:
        for name in ("pdserve.sweep.caches", "pdserve.verify.cache"):
            patched.setattr(f"{name}._POLL_SECONDS", 0.0)
        chosen = (of or plan()).model_copy(update={"cache_reset_endpoint": endpoint})
        return asked(caches, lambda target: empty(target, kept or {}), chosen)


def with_l2() -> Plan:
    some = plan()
    server = some.processes[0].model_copy(update={"name": "lmcache-0", "argv": ("lmcache", "--l2-adapter", "{}")})
    return some.model_copy(update={"processes": (*some.processes, server)})


def test_every_engine_and_lmcache_are_emptied() -> None:
    caches = Caches()
    assert emptied(caches) == {"prefill-0": EMPTIED, "decode-0": EMPTIED, "lmcache-0": "emptied of 40 objects"}
    assert caches.cleared == ["/reset_prefix_cache", "/reset_prefix_cache", "/cache/clear"]


def test_what_is_held_for_a_moment_is_waited_for() -> None:
    caches = Caches(locked=2, busy=2)
    assert emptied(caches)["lmcache-0"] == "emptied of 40 objects"
    assert caches.cleared.count("/cache/clear") == 3


def test_engines_that_only_a_start_empties_are_named_and_not_asked() -> None:
    caches = Caches()
    outcome = emptied(caches, endpoint=False, kept={"prefill": RESET_IS_OFF, "decode": RESET_IS_OFF})
    full = f"not emptied: {RESET_IS_OFF}"
    assert outcome == {"prefill-0": full, "decode-0": full, "lmcache-0": "emptied of 40 objects"}
    assert find_full_cache(outcome) == f"prefill-0: {full}"
    assert "/reset_prefix_cache" not in caches.cleared


def test_an_l2_is_kept_which_is_named_and_needs_no_start() -> None:
    outcome = emptied(Caches(), of=with_l2())
    assert outcome["lmcache-0, L2"] == LASTS
    assert find_full_cache(outcome) is None
    assert new_caches(with_l2()) == {
        **dict.fromkeys(("prefill-0", "decode-0", "lmcache-0"), NEW),
        "lmcache-0, L2": LASTS,
    }


@each_row("caches, why", [
    (Caches(locked=1000), "lmcache-0: not emptied: 40 objects are held"),
    (Caches(status=503), "lmcache-0: not emptied: POST /cache/clear was answered 503"),
    (Caches(busy=1000), "prefill-0: not emptied: the prefix cache could not be cleared"),
])  # fmt: skip
def test_what_stays_full_is_named(caches: Caches, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CLEAR_SECONDS", 0.0)
    monkeypatch.setattr("pdserve.verify.cache._CLEAR_SECONDS", 0.0)
    assert str(find_full_cache(emptied(caches))).startswith(why)


def store_in_lmcache(folder: Path, **lmcache: str) -> None:
    """The sweep's recipe with the endpoint and an LMCache in which prefill stores. `lmcache`: its environment."""
    document = yaml.safe_load(recipe(folder, engine__cache_reset_endpoint=True).read_text())
    url = f"http://127.0.0.1:{document['ports']['lmcache_http']}"
    faults: dict[str, Any] = {"lmcache__env": lmcache} if lmcache else {}
    recipe(folder, engine__cache_reset_endpoint=True, prefill__env={"FAKE_LMCACHE_URL": url}, **faults)


@pytest.mark.process
def test_a_point_does_not_find_what_the_one_before_has_stored(tmp_path: Path, pdserve_home: Path, python: str) -> None:
    file = sweep_file(tmp_path)
    store_in_lmcache(tmp_path)
    code, output = pdserve("sweep", "--python", python, file)
    assert code == 0, output
    first, second = records(pdserve_home)
    assert first.caches.keys() == second.caches.keys() == {"prefill-0", "decode-0", "lmcache-0"}
    assert (first.caches["lmcache-0"], second.caches["lmcache-0"]) == (NEW, "emptied of 4 objects")
    assert {second.caches["prefill-0"], second.caches["decode-0"]} == {EMPTIED}


@pytest.mark.process
@pytest.mark.parametrize("restarts", [True, False])
@pytest.mark.full
def test_leaked_locks_cost_a_start(tmp_path: Path, pdserve_home: Path, python: str, restarts: bool) -> None:
    file = sweep_file(tmp_path, restart_to_empty_caches=restarts)
    store_in_lmcache(tmp_path, FAKE_LMCACHE_LEAKS="3")
    code, output = pdserve("sweep", "--python", python, file)
    first, second = records(pdserve_home)
    assert (code, first.status, second.status) == (0, "VALID", "VALID"), output
    held = "not emptied: 3 objects are held"
    assert (f"begins with empty caches: lmcache-0: {held}" in output) is restarts
    assert second.caches["lmcache-0"].startswith(NEW if restarts else held)
    assert (second.run_id != first.run_id) is restarts


@pytest.mark.process
@pytest.mark.full
def test_without_the_endpoint_each_point_has_a_start(tmp_path: Path, pdserve_home: Path, python: str) -> None:
    file = sweep_file(tmp_path)
    recipe(tmp_path, lmcache=None, prefill__connector={"kind": "mooncake", "protocol": "tcp"})
    code, output = pdserve("sweep", "--python", python, file)
    assert code == 0, output
    assert "a new start before each point, to empty the caches of A: engine.cache_reset_endpoint is off" in output
    assert "to run: 2 points on 2 starts" in output
    first, second = records(pdserve_home)
    assert {*first.caches.values(), *second.caches.values()} == {NEW}
    assert first.run_id != second.run_id
    assert None not in (first.start_seconds, second.start_seconds)


# --- which deployments are started anew before each point, to begin with empty caches

NO_LMCACHE = ("lmcache=null",)
ENDPOINT = ("engine.cache_reset_endpoint=true",)
OFFLOADING = "prefill.connector={kind: multi, of: [{kind: mooncake}, {kind: offloading, cpu_gib: 1}]}"


def why_start(recipe: Recipe) -> str | None:
    return next(iter(kept_until_start(recipe).values()), None)


def raw(name: str) -> tuple[str, ...]:
    connector = f"{{kind: raw, config: {{kv_connector: {name}, kv_role: kv_both}}}}"
    return (f"prefill.connector={connector}", f"decode.connector={connector}", *NO_LMCACHE)


@each_row("text", [CPU, GPU, AGGREGATED])
def test_with_the_endpoint_an_engine_and_lmcache_are_emptied_while_they_serve(tmp_path: Path, text: str) -> None:
    assert why_start(load(tmp_path, text, *ENDPOINT).recipe) is None
    assert why_start(load(tmp_path, text).recipe) == RESET_IS_OFF


def test_engines_that_cache_no_prefix_need_no_start(tmp_path: Path) -> None:
    plain = ("prefill.connector={kind: mooncake}", *NO_LMCACHE)
    some = load(tmp_path, GPU, *plain, "prefill.args.enable-prefix-caching=false").recipe
    assert why_start(some) == RESET_IS_OFF, "decode has a cache"
    none = load(tmp_path, GPU, *plain, "engine.args.enable-prefix-caching=false").recipe
    assert why_start(none) is None


@each_row("settings, keeper", [
    ((OFFLOADING, *NO_LMCACHE), "OffloadingConnector"),
    (raw("MyConnector"), "MyConnector"),
    (raw("LMCacheMPConnector"), "LMCacheMPConnector"),  # its server is none of the deployment's
])  # fmt: skip
def test_what_a_connector_keeps_needs_one(tmp_path: Path, settings: tuple[str, ...], keeper: str) -> None:
    some = load(tmp_path, GPU, *settings, *ENDPOINT).recipe
    assert why_start(some) == f"what {keeper} keeps (prefill) is only emptied by a start"


def test_a_router_that_remembers_prompts_needs_one(tmp_path: Path) -> None:
    """It knows no salt: the prompts of a point would go where those of the one before went."""
    router = ("proxy.kind=vllm-router", "proxy.routing.prefill={kind: prefix_aware}", *ENDPOINT)
    assert why_start(load(tmp_path, GPU, *router).recipe) is None, "there is one prefill to go to"
    two = (*router, "prefill.instances=2")
    assert why_start(load(tmp_path, GPU, *two).recipe) == ROUTER
    assert why_start(load(tmp_path, GPU, *two, "proxy.kind=pdserve").recipe) is None
