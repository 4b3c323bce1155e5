"""What the official Rust router (vllm-router 0.1.17) has of a recipe's `proxy:` section, and under which names."""

from __future__ import annotations

KIND = "vllm-router"

SETTINGS = frozenset(
    {
        "kind",
        "host",
        "request_timeout_seconds",
        "drain_seconds",
        "max_body_bytes",
        "routing",
        "health",
        "restart",
        "command",
    }
)
"""Keys of the section that mean the same there. It has a circuit breaker too, which never opens with prefill and
decode, so `breaker` is not among them."""

POLICIES = {"round_robin": "round_robin", "power_of_two": "power_of_two", "prefix_aware": "cache_aware"}
"""A recipe's policy -> the router's. Its kv_aware needs event sources with blocks of 16 tokens, its sticky and hashing
policies have no counterpart here."""

DEFAULT_POLICY = "power_of_two"
"""Of a pool for which the recipe names none: what comes nearest to pdserve's own least_loaded."""
