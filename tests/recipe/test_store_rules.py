"""What a recipe with a Mooncake store, offloading or a raw multi may not say, each with the reason and the fix."""

from __future__ import annotations

from pathlib import Path

from tests.recipe.kit import AGGREGATED, CPU, GPU, Options, load, refused
from tests.tables import each_row

STORE = "mooncake_store={segment_gib: 1, protocol: tcp}"
BESIDE = "prefill.connector={kind: multi, of: [{kind: mooncake, protocol: tcp}, {kind: mooncake-store}]}"
RAW = (
    "prefill.connector={kind: raw, config: {kv_connector: MultiConnector, kv_connector_extra_config: "
    "{connectors: [{kv_connector: MooncakeConnector, kv_role: kv_producer, %s}]}}}"
)
RAW_DECODE = "decode.connector={kind: raw, config: {kv_connector: MooncakeConnector, kv_role: kv_consumer}}"
CHILD = "prefill.connector.config.kv_connector_extra_config.connectors.0"

CASES: list[tuple[str, Options, str]] = [
    (CPU, (BESIDE, "lmcache=null"), "prefill.connector.of.1: there is no mooncake_store section"),
    (CPU, STORE, "mooncake_store: no connector uses the store"),
    (CPU, (BESIDE, "lmcache=null", "mooncake_store={segment_gib: 1}"), "prefill.connector.of.1: the store uses rdma,"),
    (
        CPU,
        (BESIDE, "lmcache=null", STORE, "prefill.env={MOONCAKE_CONFIG_PATH: /etc/store.json}"),
        "prefill.env.MOONCAKE_CONFIG_PATH: pdserve writes this file from the mooncake_store section",
    ),
    (
        CPU,
        (BESIDE, "lmcache=null", STORE, "prefill.args.enable-prefix-caching=false"),
        "prefill.args.enable-prefix-caching: mooncake-store keeps KV by the block hashes",
    ),
    (
        CPU,
        (BESIDE, "lmcache=null", "mooncake_store={segment_gib: 1, protocol: tcp, extra_args: {rpc_port: 1}}"),
        "mooncake_store.extra_args.rpc_port: pdserve sets this flag",
    ),
    (
        CPU,
        (BESIDE, "lmcache=null", "mooncake_store={segment_gib: 1, protocol: tcp, extra_args: {eviction-ratio: 0.1}}"),
        "mooncake_store.extra_args.eviction-ratio: flags of mooncake_master have underscores",
    ),
    (CPU, ("prefill.connector.of.2={kind: mooncake-store}", STORE), "prefill.connector: lmcache-mp and mooncake-store"),
    (
        CPU,
        (RAW % "kv_load_failure_policy: recompute", RAW_DECODE, "lmcache=null"),
        f"{CHILD}.kv_load_failure_policy: vLLM reads it at the top level only",
    ),
    (
        CPU,
        (RAW % "engine_id: a", RAW_DECODE, "lmcache=null"),
        f"{CHILD}.engine_id: vLLM gives every child the engine_id of the MultiConnector",
    ),
    (
        CPU,
        (
            "prefill.connector={kind: raw, config: {kv_connector: NixlPushConnector}}",
            "decode.connector={kind: raw, config: {kv_connector: NixlPushConnector}}",
            "lmcache=null",
        ),
        "prefill.connector: NixlPushConnector: NIXL push is not supported: it ran on no device here",
    ),
    (
        CPU,
        ("prefill.connector={kind: nixl-push}", "lmcache=null"),
        'no connector is called "nixl-push"; there are mooncake, nixl, moriio, lmcache-mp, mooncake-store',
    ),
    (
        GPU,
        (
            "prefill.connector={kind: raw, config: {kv_connector: MoRIIOConnector, kv_role: kv_producer}}",
            "decode.connector={kind: raw, config: {kv_connector: MoRIIOConnector, kv_role: kv_consumer}}",
            "lmcache=null",
        ),
        "prefill.connector: MoRIIOConnector: in vllm 0.32 decode computes on before its KV has arrived",
    ),
    (
        AGGREGATED,
        ("aggregated.connector={kind: offloading, cpu_gib: 4, store_threshold: -1}", "lmcache=null"),
        "aggregated.connector.store_threshold: expected at least 0, got -1",
    ),
    (GPU, ("prefill.connector={kind: offloading, cpu_gib: 4}", "lmcache=null"), "nothing here moves KV"),
]


@each_row("base, options, what", CASES)
def test_it_is_refused(tmp_path: Path, base: str, options: Options, what: str) -> None:
    assert what in refused(tmp_path, base, options)


def test_a_raw_multi_with_the_policy_at_the_top_is_accepted(tmp_path: Path) -> None:
    top = "prefill.connector.config.kv_load_failure_policy=recompute"
    load(tmp_path, CPU, RAW % "kv_connector_extra_config: {}", RAW_DECODE, "lmcache=null", top)


def test_offloading_was_run_on_no_gpu_and_a_warning_has_it(tmp_path: Path) -> None:
    change = "aggregated.connector={kind: offloading, cpu_gib: 4}"
    warnings = load(tmp_path, AGGREGATED, change, "lmcache=null").warnings
    assert any("offloading was checked against vLLM's classes only" in line for line in warnings)
