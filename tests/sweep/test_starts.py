"""Which deployments a sweep starts anew before each of their points, so that those begin with empty caches."""

from __future__ import annotations

from pathlib import Path

from pdserve.sweep.caches import RESET_IS_OFF, ROUTER, ends_with_it, only_emptied_by_a_start
from tests.recipe.kit import AGGREGATED, CPU, GPU, load
from tests.tables import each_row

NO_LMCACHE = ("lmcache=null",)
STORE = ("mooncake_store.segment_gib=1",)
ENDPOINT = ("engine.cache_reset_endpoint=true",)
OFFLOADING = "prefill.connector={kind: multi, of: [{kind: mooncake}, {kind: offloading, cpu_gib: 1}]}"


def raw(name: str) -> tuple[str, ...]:
    connector = f"{{kind: raw, config: {{kv_connector: {name}, kv_role: kv_both}}}}"
    return (f"prefill.connector={connector}", f"decode.connector={connector}", *NO_LMCACHE)


@each_row("text", [CPU, GPU, AGGREGATED])
def test_with_the_endpoint_an_engine_and_lmcache_are_emptied_while_they_serve(tmp_path: Path, text: str) -> None:
    assert only_emptied_by_a_start(load(tmp_path, text, *ENDPOINT).recipe) is None
    assert only_emptied_by_a_start(load(tmp_path, text).recipe) == RESET_IS_OFF


def test_engines_that_cache_no_prefix_need_no_start(tmp_path: Path) -> None:
    plain = ("prefill.connector={kind: mooncake}", *NO_LMCACHE)
    some = load(tmp_path, GPU, *plain, "prefill.args.enable-prefix-caching=false").recipe
    assert only_emptied_by_a_start(some) == RESET_IS_OFF, "decode has a cache"
    none = load(tmp_path, GPU, *plain, "engine.args.enable-prefix-caching=false").recipe
    assert only_emptied_by_a_start(none) is None


@each_row("settings, keeper", [
    ((OFFLOADING, *NO_LMCACHE), "OffloadingConnector"),
    (raw("MyConnector"), "MyConnector"),
    (raw("LMCacheMPConnector"), "LMCacheMPConnector"),  # its server is none of the deployment's
])  # fmt: skip
def test_what_a_connector_keeps_needs_one(tmp_path: Path, settings: tuple[str, ...], keeper: str) -> None:
    some = load(tmp_path, GPU, *settings, *ENDPOINT).recipe
    assert only_emptied_by_a_start(some) == f"what {keeper} keeps (prefill) is only emptied by a start"


def test_a_mooncake_store_needs_one(tmp_path: Path) -> None:
    store = "prefill.connector={kind: multi, of: [{kind: mooncake}, {kind: mooncake-store}]}"
    some = load(tmp_path, GPU, store, *NO_LMCACHE, *STORE, *ENDPOINT).recipe
    assert "MooncakeStoreConnector" in (only_emptied_by_a_start(some) or "")


def test_a_router_that_remembers_prompts_needs_one(tmp_path: Path) -> None:
    """It knows no salt: the prompts of a point would go where those of the one before went."""
    router = ("proxy.kind=vllm-router", "proxy.routing.prefill={kind: prefix_aware}", *ENDPOINT)
    assert only_emptied_by_a_start(load(tmp_path, GPU, *router).recipe) is None, "there is one prefill to go to"
    two = (*router, "prefill.instances=2")
    assert only_emptied_by_a_start(load(tmp_path, GPU, *two).recipe) == ROUTER
    assert only_emptied_by_a_start(load(tmp_path, GPU, *two, "proxy.kind=pdserve").recipe) is None


def test_what_lmcache_or_an_unknown_connector_keeps_may_outlast_the_deployment() -> None:
    assert ends_with_it("OffloadingConnector")
    assert ends_with_it("MooncakeStoreConnector")
    assert not ends_with_it("LMCacheMPConnector")
    assert not ends_with_it("MyConnector")
