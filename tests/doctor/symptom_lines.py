"""A line for each known symptom, made from the log call of the release that has it.

`tests/upstream/test_documents.py` reads the call in the sources of vllm 0.32.0 and lmcache 0.5.6.
"""

from __future__ import annotations

import re
from typing import NamedTuple

VLLM = "(EngineCore pid=21535) {level} 11-24 11:57:24 [{at}] {text}"
LMCACHE = "\x1b[33;20m[2026-11-24 11:57:24,342] LMCache {level}:\x1b[0m {text} \x1b[3m({at}:lmcache)\x1b[0m"
_MOONCAKE = "vllm/distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py"
_NIXL = "vllm/distributed/kv_transfer/kv_connector/v1/nixl/base_worker.py"
_ADAPTER = "lmcache/integration/vllm/vllm_multi_process_adapter.py"
_MP = "lmcache/v1/multiprocess"
_L1 = "lmcache/v1/distributed/l1_manager.py"


class SymptomLine(NamedTuple):
    """A line of a process that lives."""

    process: str
    source: str
    """File of the package that has the log call."""
    call: str
    """A piece of the call's text, as it is there."""

    @property
    def text(self) -> str:
        return re.sub(r"%[.\d]*[dfrs]", "7", self.call)

    def line(self) -> str:
        form = VLLM if self.source.startswith("vllm") else LMCACHE
        return form.format(level="WARNING", at=f"{self.source.rpartition('/')[2]}:1", text=self.text)


LINES = (
    SymptomLine("prefill-0", _MOONCAKE, "Sending to %s failed (ret=%s) after %s"),
    SymptomLine("decode-0", _MOONCAKE, "pulling kv_caches for %s failed: %s"),
    SymptomLine("decode-1", _NIXL, "NIXL transfer failure: %s | Context: %s"),
    SymptomLine("decode-0", _MOONCAKE, "Failed to connect to bootstrap server %s (%s): %s"),
    SymptomLine("prefill-0", _MOONCAKE, "Request %s timed out after %d seconds without being sent"),
    SymptomLine("prefill-1", _NIXL, "Releasing expired KV blocks for request %s"),
    SymptomLine("prefill-0", _MOONCAKE, "Timeout waiting for P side ready: %s"),
    SymptomLine("prefill-0", _MOONCAKE, "Missing transfer_id in kv_transfer_params from router!"),
    SymptomLine("prefill-0", _MOONCAKE, "req %s: KV group count mismatch: local=%d, remote=%d"),
    SymptomLine("prefill-0", _ADAPTER, "LMCache server is unhealthy"),
    SymptomLine(
        "lmcache-0",
        f"{_MP}/modules/engine_driven_transfer.py",
        "Reaped non-GPU instance %d: silent for %.1fs (pinged=%s)",
    ),
    SymptomLine(
        "lmcache-0",
        f"{_MP}/modules/lmcache_driven_transfer.py",
        "Rejecting RETRIEVE for unregistered GPU instance ID %d",
    ),
    SymptomLine(
        "lmcache-0",
        "lmcache/v1/distributed/storage_controllers/prefetch_controller.py",
        "%d L1 reservations failed with out-of-memory",
    ),
    SymptomLine("lmcache-0", _L1, "L1Manager: finish read on non-existing key %s"),
    SymptomLine("lmcache-0", _L1, "L1Manager: write reservation on key %s (tag %r) expired"),
    SymptomLine(
        "prefill-0",
        f"{_MP}/transfer_context/worker_transfer.py",
        "A store did not finish within %.1fs; its KV blocks may be overwritten",
    ),
    SymptomLine("prefill-0", _ADAPTER, "Something went wrong when processing the retrieve request"),
    SymptomLine(
        "prefill-0",
        f"{_MP}/transfer_context/base.py",
        "Failed to initialize SHM context (shm_name=%s), falling back to pickle transport",
    ),
    SymptomLine(
        "lmcache-0",
        f"{_MP}/affinity_pool.py",
        "AffinityThreadPool: affinity_key=%d wrapped onto worker slot %d (only %d workers)",
    ),
    SymptomLine("lmcache-0", f"{_MP}/token_hasher.py", "Using builtin hash without PYTHONHASHSEED set"),
    SymptomLine("prefill-1", _ADAPTER, "LMCache hit mismatch across servers: %s"),
)
"""The lines of the proxy are not here: tests/doctor/test_provoked.py has the proxy write them."""
