"""What became of every behaviour of the pull requests that the patches grew from: ours, upstream's, or neither."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pdserve.patches.patch import Behaviour


@dataclass(frozen=True)
class Outcome:
    """One item of a behaviour."""

    behaviour: Behaviour
    what: str
    verdict: Literal["ours", "upstream", "not applicable"]
    where: str
    """The patch, the rule or the upstream change."""
    test: str
    """File of the test that shows it."""
    since: str = ""
    """verdict upstream: the first release that has it."""


_UPSTREAM = "tests/upstream/test_"

BEHAVIOURS: tuple[Outcome, ...] = (
    Outcome("metrics crash", "MultiConnector survives Mooncake's metrics", "ours",
        "multiconnector-prom-metrics, vllm < 0.33", f"{_UPSTREAM}metrics.py"),
    Outcome("metrics crash", "the same on newer vLLM", "upstream", "its observe skips unknown children",
        f"{_UPSTREAM}metrics.py", since="vllm 0.33.0"),
    Outcome("stale completions", "late, doubled and unknown notifications are dropped and counted", "ours",
        "stale-completions", f"{_UPSTREAM}stale_completions.py"),
    Outcome("KV memory deadlock", "requests that wait for blocks of each other", "upstream",
        "blocks are reserved for prefills in flight (vllm#44560)", f"{_UPSTREAM}simulation.py", since="vllm 0.23.0"),
    Outcome("KV memory deadlock", "a failed load that finds no room stops no load that has arrived (hybrid models)",
        "ours", "failed-loads-stand-back, vllm >= 0.31; ready-waiters-first before",
        f"{_UPSTREAM}failed_loads.py"),
    Outcome("KV memory deadlock", "a load that is offered again after it has failed need not fit beside itself",
        "ours", "failed-loads-stand-back", f"{_UPSTREAM}failed_loads.py"),
    Outcome("reloads from LMCache", "cap of a load", "ours", "lmcache-load-cap, setting max_tokens_per_load",
        f"{_UPSTREAM}lmcache_reload.py"),
    Outcome("choice of connector", "tokens x load_weight, overtaking, counters, no stale choice", "ours",
        "multiconnector-selection", f"{_UPSTREAM}multiconnector_selection.py"),
    Outcome("choice of connector", "a child that does not load stores the right blocks", "upstream",
        "every child gets the blocks of a request (vllm#46865)", f"{_UPSTREAM}multiconnector_lmcache.py",
        since="vllm 0.26.0"),
    Outcome("failed and late loads", "a load that takes too long", "ours",
        "load-timeout, setting load_timeout_seconds", f"{_UPSTREAM}load_timeout.py"),
    Outcome("failed and late loads", "the end of a save that LMCache drops", "ours", "lmcache-lost-send",
        f"{_UPSTREAM}lmcache_connector.py"),
    Outcome("failed and late loads", "what a failed load did not bring is not stored as if it were computed", "ours",
        "lmcache-computed-count", f"{_UPSTREAM}lmcache_connector.py"),
    Outcome("failed and late loads", "a failed load of one KV group falls back for the whole request", "ours",
        "failed-group, vllm < 0.30", f"{_UPSTREAM}failed_loads.py"),
    Outcome("failed and late loads", "the same on newer vLLM", "upstream", "failed_recving by request (vllm#50388)",
        f"{_UPSTREAM}failed_loads.py", since="vllm 0.30.0"),
    Outcome("failed and late loads", "the same for NIXL, whose worker says nothing of it", "ours",
        "nixl-failed-groups, vllm < 0.30", f"{_UPSTREAM}nixl.py"),
    Outcome("reloads from LMCache", "a request that ends before it has blocks leaves no read locks at LMCache",
        "ours", "lmcache-lookup-locks; multiconnector-selection below MultiConnector",
        f"{_UPSTREAM}lmcache_reload.py"),
    Outcome("reloads from LMCache", "a small reload is computed instead", "ours",
        "lmcache-min-load, setting min_load_tokens", f"{_UPSTREAM}lmcache_reload.py"),
    Outcome("KV memory deadlock", "loaded waiters go before fresh admissions", "ours",
        "ready-waiters-first, vllm < 0.31", f"{_UPSTREAM}ready_waiters_first.py"),
    Outcome("KV memory deadlock", "the same on newer vLLM", "upstream",
        "a queue of its own for requests that hold KV", f"{_UPSTREAM}ready_waiters_first.py", since="vllm 0.31.0"),
    Outcome("reloads from LMCache", "a local prefix that ends inside a chunk", "upstream",
        "LMCache skips the first tokens of the chunk", f"{_UPSTREAM}lmcache_server.py", since="lmcache 0.4.5"),
    Outcome("reloads from LMCache", "lookup on rank 0", "not applicable",
        "LMCache MP looks up once, in the scheduler's process", f"{_UPSTREAM}lmcache_server.py"),
    Outcome("reloads from LMCache", "reloads are not queued behind the saves of other ranks", "ours",
        "the plan gives LMCache a transfer thread a worker; a rank's reload still waits for its own saves",
        "tests/plan/test_lmcache_servers.py"),
    Outcome("hybrid models", "KV groups of hybrid models with LMCache", "upstream",
        "blocks are sliced by tokens (lmcache#3419)", f"{_UPSTREAM}hybrid_groups.py",
        since="lmcache 0.4.7 with vllm 0.22.1"),
    Outcome("hybrid models", "recurrent state goes on where there is one", "ours", "common-local-hit, vllm < 0.28",
        f"{_UPSTREAM}common_local_hit.py"),
    Outcome("hybrid models", "the same on newer vLLM", "upstream",
        "a connector has to say that it brings states (vllm#50344)", f"{_UPSTREAM}common_local_hit.py",
        since="vllm 0.28.0"),
    Outcome("hybrid models", "recipes with hybrid models on pairs that corrupt or disable it", "ours",
        "refused before the start", "tests/plan/test_hybrid.py"),
    Outcome("hybrid models", "chunks over groups with different block sizes", "ours",
        "refused before the start when nothing can be stored", f"{_UPSTREAM}hybrid_groups.py"),
    Outcome("abandoned transfers", "bad parameters and prefills that stop", "ours", "mooncake-requests",
        f"{_UPSTREAM}mooncake_requests.py"),
    Outcome("abandoned transfers", "pulls of aborted prefills, dead prefills, departed clients", "ours",
        "mooncake-sends, mooncake-pulls", f"{_UPSTREAM}mooncake_transfers.py"),
    Outcome("abandoned transfers", "a prefill restarted beside a live bootstrap server", "ours", "mooncake-bootstrap",
        f"{_UPSTREAM}mooncake_transfers.py"),
    Outcome("LMCache server", "memory pinned on demand, watermark of the final size", "ours",
        "lmcache-demand-pinned, lmcache-final-capacity; switched on in lmcache.env",
        f"{_UPSTREAM}lmcache_rocm.py"),
    Outcome("LMCache server", "block copy without a kernel", "upstream",
        "platform/torch_ops; on ROCm a build without kernels is refused (lmcache#4870)",
        "tests/test_lmcache_kernels.py", since="lmcache 0.4.7"),
    Outcome("CPU without accelerator", "Mooncake without an accelerator", "ours", "mooncake-cpu-device",
        "tests/patches/test_real.py"),
    Outcome("CPU without accelerator", "LMCache's transfer mode on CPU", "ours",
        "the plan names it on both sides and refuses a pair that differs", "tests/plan/test_kv_transfer.py"),
)  # fmt: skip
