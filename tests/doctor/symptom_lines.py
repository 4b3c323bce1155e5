"""A line for each known symptom, made from the log call of the release that it names.

`tests/upstream/test_documents.py` reads the call in the sources of vllm 0.32.0 and lmcache 0.5.6.
"""

from __future__ import annotations

from typing import NamedTuple

VLLM = "(EngineCore pid=21535) {level} 11-24 11:57:24 [{at}] {text}"
LMCACHE = "\x1b[33;20m[2026-11-24 11:57:24,342] LMCache {level}:\x1b[0m {text} \x1b[3m({at}:lmcache)\x1b[0m"
_MOONCAKE = "vllm/distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py"
_NIXL = "vllm/distributed/kv_transfer/kv_connector/v1/nixl"
_ADAPTER = "lmcache/integration/vllm/vllm_multi_process_adapter.py"
_MP = "lmcache/v1/multiprocess"
_L1 = "lmcache/v1/distributed/l1_manager.py"


class SymptomLine(NamedTuple):
    """A line of a process that lives."""

    rule: str
    process: str
    text: str
    """Without what the logger puts before it."""
    source: str
    """File of the package whose log call has `call`."""
    call: str
    """A piece of the text that the call has as it is."""

    def line(self) -> str:
        form = VLLM if self.source.startswith("vllm") else LMCACHE
        return form.format(level="WARNING", at=f"{self.source.rpartition('/')[2]}:1", text=self.text)


LINES = (
    SymptomLine(
        "transfer-failed",
        "prefill-0",
        "Sending to 10.1.0.2:15321 failed (ret=-1) after 0.42 (64 descriptors, 8388608 bytes)",
        _MOONCAKE,
        "Sending to %s failed (ret=%s) after %s",
    ),
    SymptomLine(
        "transfer-failed",
        "decode-0",
        "pulling kv_caches for ['cmpl-1-0'] failed: the peer has closed the connection",
        _MOONCAKE,
        "pulling kv_caches for %s failed: %s",
    ),
    SymptomLine(
        "transfer-failed",
        "decode-1",
        "NIXL transfer failure: handshake_failed | Context: {'engine_id': 'a'}",
        f"{_NIXL}/base_worker.py",
        "NIXL transfer failure: %s | Context: %s",
    ),
    SymptomLine(
        "bootstrap-unreachable",
        "decode-0",
        "Failed to connect to bootstrap server http://10.1.0.1:8998 (ConnectTimeout): timed out",
        _MOONCAKE,
        "Failed to connect to bootstrap server %s (%s): %s",
    ),
    SymptomLine(
        "kv-never-fetched",
        "prefill-0",
        "Request cmpl-1-0 timed out after 60 seconds without being sent. Freeing its blocks on the producer side.",
        _MOONCAKE,
        "Request %s timed out after %d seconds without ",
    ),
    SymptomLine(
        "kv-never-fetched",
        "prefill-1",
        "Releasing expired KV blocks for request cmpl-1-0 which were retrieved by 0 remote worker(s) before lease",
        f"{_NIXL}/base_worker.py",
        "Releasing expired KV blocks for request %s which were ",
    ),
    SymptomLine(
        "prefill-late",
        "prefill-0",
        "Timeout waiting for P side ready: ['cmpl-1-0']",
        _MOONCAKE,
        "Timeout waiting for P side ready: %s",
    ),
    SymptomLine(
        "requests-past-the-proxy",
        "prefill-0",
        "Missing transfer_id in kv_transfer_params from router!",
        _MOONCAKE,
        "Missing transfer_id in kv_transfer_params from router!",
    ),
    SymptomLine(
        "kv-layouts-differ",
        "prefill-0",
        "req cmpl-1-0: KV group count mismatch: local=1, remote=2",
        _MOONCAKE,
        "req %s: KV group count mismatch: local=%d, remote=%d",
    ),
    SymptomLine(
        "cache-server-silent",
        "prefill-0",
        "LMCache server is unhealthy — entering degraded mode",
        _ADAPTER,
        "LMCache server is unhealthy",
    ),
    SymptomLine(
        "cache-engine-forgotten",
        "lmcache-0",
        "Reaped non-GPU instance 2041985604155780616: silent for 121.0s (pinged=True)",
        f"{_MP}/modules/engine_driven_transfer.py",
        "Reaped non-GPU instance %d: silent for %.1fs (pinged=%s)",
    ),
    SymptomLine(
        "cache-engine-forgotten",
        "lmcache-0",
        "Rejecting RETRIEVE for unregistered GPU instance ID 7",
        f"{_MP}/modules/lmcache_driven_transfer.py",
        "Rejecting RETRIEVE for unregistered GPU instance ID %d",
    ),
    SymptomLine(
        "cache-too-small",
        "lmcache-0",
        "PrefetchController: 12 L1 reservations failed with out-of-memory; L1 may be under memory pressure",
        "lmcache/v1/distributed/storage_controllers/prefetch_controller.py",
        "%s: %d L1 reservations failed with out-of-memory; ",
    ),
    SymptomLine(
        "cache-lease-expired",
        "lmcache-0",
        "L1Manager: finish read on non-existing key k, potential inconsistent data might be read",
        _L1,
        "L1Manager: finish read on non-existing key %s, ",
    ),
    SymptomLine(
        "cache-lease-expired",
        "lmcache-0",
        "L1Manager: write reservation on key k (tag 't') expired; handing the buffer to a new writer",
        _L1,
        "L1Manager: write reservation on key %s (tag %r) expired; ",
    ),
    SymptomLine(
        "cache-store-overwritten",
        "prefill-0",
        "A store did not finish within 60.0s; its KV blocks may be overwritten while the server is still reading them",
        f"{_MP}/transfer_context/worker_transfer.py",
        "A store did not finish within %.1fs; its KV blocks may ",
    ),
    SymptomLine(
        "cache-transfer-failed",
        "prefill-0",
        "Something went wrong when processing the retrieve request for request_id=cmpl-1-0, result=False",
        _ADAPTER,
        "Something went wrong when processing the ",
    ),
    SymptomLine(
        "cache-slow-copies",
        "prefill-0",
        "Failed to initialize SHM context (shm_name=pool), falling back to pickle transport",
        f"{_MP}/transfer_context/base.py",
        "Failed to initialize SHM context (shm_name=%s), ",
    ),
    SymptomLine(
        "cache-slow-copies",
        "lmcache-0",
        "AffinityThreadPool: affinity_key=3 wrapped onto worker slot 1 (only 2 workers), so it shares a thread",
        f"{_MP}/affinity_pool.py",
        "AffinityThreadPool: affinity_key=%d wrapped onto worker slot ",
    ),
    SymptomLine(
        "hash-seeds-differ",
        "lmcache-0",
        "Using builtin hash without PYTHONHASHSEED set. For production environments (non-testing scenarios), you MUST",
        f"{_MP}/token_hasher.py",
        "Using builtin hash without PYTHONHASHSEED set. ",
    ),
    SymptomLine(
        "cache-servers-disagree",
        "prefill-1",
        "[req=cmpl-1-0] LMCache hit mismatch across servers: {'tcp://a': 4, 'tcp://b': 0} -> take min=0",
        _ADAPTER,
        "LMCache hit mismatch across servers: %s",
    ),
)
"""The lines of the proxy are not here: tests/doctor/test_provoked.py has the proxy write them."""
