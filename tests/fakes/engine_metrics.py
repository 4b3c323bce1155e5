"""The fake's counters, under vLLM's names."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.fakes.engine_api import Engine


def metrics_page(engine: Engine) -> str:
    """Prometheus text."""
    labels = f'engine="0",model_name="{engine.args.served_model_name}"'
    held = engine.producer.held if engine.producer else 0
    values: dict[str, float] = {
        "num_requests_running": engine.running,
        "num_requests_waiting": engine.waiting,
        "kv_cache_usage_perc": min(1.0, (engine.running + engine.waiting + held) / 100),
        "prefix_cache_queries_total": engine.local.queries,
        "prefix_cache_hits_total": engine.local.hits,
        "external_prefix_cache_queries_total": engine.external.queries,
        "external_prefix_cache_hits_total": engine.external.hits,
        "generation_tokens_total": engine.generated,
    }
    lines = [f"vllm:{name}{{{labels}}} {value}" for name, value in values.items()]
    for source, count in engine.source_tokens.items():
        lines.append(f'vllm:prompt_tokens_by_source_total{{{labels},source="{source}"}} {count}')
    lines.append(f'vllm:cache_config_info{{engine="0",block_size="{engine.external.block}"}} 1.0')
    if engine.connectors.store:
        lines += _store_lines(engine, labels)
    lines.append(
        f'pdserve_patch_effects_total{{effect="out-of-sockets",patch="mooncake-pulls"}} {engine.script.out_of_sockets}'
    )
    return "\n".join(lines) + "\n"


def _store_lines(engine: Engine, labels: str) -> list[str]:
    """Write them as MooncakeStorePromMetrics of vLLM 0.32 does."""
    counts = {"save_put": engine.stored_keys, "load_get": engine.loaded_keys}
    name = "vllm:mooncake_store_operation"
    lines = []
    for operation, keys in counts.items():
        failed = keys if engine.script.store_fails and operation == "save_put" else 0
        of = f'{labels},operation="{operation}",status="{"error" if failed else "ok"}"'
        lines += [f"{name}_keys_total{{{of}}} {keys}", f"{name}_failed_keys_total{{{of}}} {failed}"]
    return lines
