"""What the fake counts, under vLLM's names."""

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
    lines.append(
        f'pdserve_patch_effects_total{{effect="out-of-sockets",patch="mooncake-pulls"}} {engine.script.out_of_sockets}'
    )
    return "\n".join(lines) + "\n"
