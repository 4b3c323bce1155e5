"""Prefill/decode protocols: Mooncake, NIXL, one engine; dispatch and retries."""
