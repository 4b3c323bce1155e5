"""LMCache, as its server and as an engine report it."""

from __future__ import annotations

from pdserve.logs.known_causes.rule import ENGINES, LMCACHE, Rule, rule

LMCACHE_RULES: tuple[Rule, ...] = (
    # LMCache, seen by the server
    rule(
        r"Legacy L1 configuration requires --l1-size-gb",
        "LMCache was started without a size or an eviction policy",
        "set lmcache.l1_size_gb; lmcache.command must pass its arguments on",
        LMCACHE,
    ),
    rule(
        r"can't allocate memory: you tried to allocate (?P<bytes>\d+) bytes",
        "there is not enough memory for L1 ({bytes} bytes at once)",
        "lower lmcache.l1_size_gb",
        LMCACHE,
    ),
    rule(
        r"ValueError: worker reap timeout (?P<why>.+)",
        "lmcache.worker_reap_seconds does not fit: {why}",
        "keep it at 30 or more, and at three times lmcache.heartbeat_seconds",
        LMCACHE,
    ),
    rule(
        r"ValueError: (?P<why>(?:Invalid JSON for )?--l2-adapter .+)",
        "an L2 adapter is refused: {why}",
        "correct lmcache.l2",
        LMCACHE,
    ),
    rule(
        r"Mooncake Store L2 adapter requires the C\+\+ Mooncake extension",
        "LMCache's wheel was built without the mooncake_store adapter",
        "build LMCache from source with Mooncake, or use another adapter in lmcache.l2",
        LMCACHE,
    ),
    rule(
        r"No handler registered for operation \w*register_kv_cache",
        "an engine asked for a transfer mode that this server was not started with",
        "set lmcache.transfer_mode: auto (on CPU engines use engine_driven)",
        LMCACHE,
    ),
    # LMCache, seen by the engine
    rule(
        r"LMCache chunk size (?P<chunk>\d+) must be a multiple of (?P<block>\d+)",
        "lmcache.chunk_size {chunk} is not a multiple of the engine's block size {block}",
        "set lmcache.chunk_size to a multiple of {block}",
        ENGINES,
    ),
    rule(
        r"Cannot reach the LMCache MP server at '(?P<url>[^']+)'",
        "no LMCache server answers at {url}",
        "look at the log of the LMCache server: it died, or listens on another port",
        ENGINES,
    ),
    rule(
        r"did not respond to register_kv_caches within (?P<seconds>[\d.]+)\s*s",
        "LMCache did not register the engine's KV within {seconds} s: the two sides use different transfer modes, or "
        "a large L1 is still being pinned",
        "look for 'No handler registered' in LMCache's log; if it is there set lmcache.transfer_mode: auto, otherwise "
        "raise lmcache.mq_timeout_seconds or lower lmcache.l1_size_gb",
        ENGINES,
    ),
    rule(
        r"hipErrorInvalidDevicePointer|cudaErrorInvalidDevicePointer",
        "host memory could not be registered with the device; a single L1 of more than about 900 GB did this",
        "lower lmcache.l1_size_gb, or use lmcache.per: tp-rank",
    ),
)
