"""Flags that came, went or lost their effect between releases.

Read in the argument parsers of vllm 0.21.0, 0.22.1, 0.23.0, 0.24.0, 0.26.0, 0.27.1 and 0.28.0 to 0.33.0, and of lmcache
0.4.5, 0.4.6, 0.4.7 and 0.5.4 to 0.5.6. A range holds for those releases and what is between two that agree: of 0.27.0,
which was not read, nothing is claimed. The flags of one version that are only unknown to another are a warning of
recipe/rules; only what is here is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Flag:
    """A flag that some versions do not have, or ignore."""

    package: str
    name: str
    """Without the dashes."""
    versions: str
    """Range (PEP 440) of those versions."""
    what: str
    """What they do with it, after `vllm 0.30.0 `."""
    todo: str
    ignored: bool = False
    """It is taken and does nothing; otherwise the process ends at once."""


def _gone(package: str, name: str, versions: str, last: str, todo: str) -> Flag:
    return Flag(package, name, versions, f"has no flag {name}: {last} was the last with it", todo)


def _new(package: str, versions: str, since: str, names: str) -> Iterator[Flag]:
    for name in names.split():
        todo = f"use {package} >= {since}, or remove it"
        yield Flag(package, name, versions, f"has no flag {name}: {since} brought it", todo)


def _ignored(name: str, versions: str, why: str) -> Flag:
    return Flag("vllm", name, versions, f"ignores {name}: {why}", "remove it: vLLM is going to refuse it", ignored=True)


FLAGS: tuple[Flag, ...] = (
    # vllm: removed and renamed
    _gone("vllm", "max-num-partial-prefills", ">=0.27.1", "0.26.0", "remove it"),
    _gone("vllm", "max-long-partial-prefills", ">=0.27.1", "0.26.0", "remove it"),
    _gone("vllm", "calculate-kv-scales", ">=0.28", "0.27.1", "remove it: the scales come from the checkpoint"),
    _gone("vllm", "override-attention-dtype", ">=0.28", "0.27.1", "remove it"),
    _gone("vllm", "enable-bf16x3-router-gemm", ">=0.30", "0.29.0", "remove it"),
    _gone(
        "vllm",
        "enable-mamba-fine-grained-prefix-cache",
        ">=0.31",
        "0.30.0",
        "write enable-mamba-shared-prefix-checkpoint: it was renamed",
    ),
    Flag(
        "vllm",
        "enable-mamba-fine-grained-prefix-cache",
        "<=0.29.0",
        "has no flag enable-mamba-fine-grained-prefix-cache: 0.30.0 alone had it",
        "remove it; vllm >= 0.31 has enable-mamba-shared-prefix-checkpoint",
    ),
    # vllm: ignored
    _ignored("disable-cascade-attn", ">=0.32", "cascade attention was removed"),
    _ignored("mamba-cache-mode", ">=0.33", "Mamba prefix caching follows enable-prefix-caching"),
    # vllm: new
    *_new(
        "vllm",
        "<=0.26.0",
        "0.27.1",
        "enable-fault-tolerance fault-tolerance-config kda-prefill-backend mamba-ssu-algorithm mm-hasher-algorithm "
        "replayssm-buffer-len use-replayssm video-pruning-method",
    ),
    *_new(
        "vllm", "<=0.27.1", "0.28", "ec-manager-config mm-device-do-normalize mm-processor-device return-sampling-mask"
    ),
    *_new(
        "vllm",
        "<=0.28.0",
        "0.29",
        "dcp-q-replicate enable-batch-sharded-sampling enable-trace-replay max-num-queued-reqs max-num-queued-tokens "
        "per-request-spec-decode-metrics prefix-cache-retention-interval",
    ),
    *_new(
        "vllm",
        "<=0.29.0",
        "0.30",
        "dp-sync-interval elastic-ep-max-dp-size enable-nccl-comm-suspend engram-config kda-decode-backend "
        "sparse-indexer-topk-backend watermark-config",
    ),
    *_new(
        "vllm",
        "<=0.30.0",
        "0.31",
        "aux-output-config device-memory-utilization enable-mamba-shared-prefix-checkpoint logging-config "
        "long-prefill-token-threshold-adaptive max-lora-cls-labels max-num-active-seqs sleep-preserve-parameter-names "
        "swa-bounded-replay",
    ),
    *_new(
        "vllm",
        "<=0.31.0",
        "0.32",
        "custom-histogram-buckets enable-hc-sp enable-shm-tensor-arena sleep-mode-offload-cudagraph",
    ),
    *_new("vllm", "<=0.32.0", "0.33", "monokernel sleep-mode-backend watchdog-config"),
    # lmcache server
    _gone(
        "lmcache",
        "transfer-mode",
        ">=0.4.7",
        "0.4.6",
        "set lmcache.transfer_mode (the flag is supported-transfer-mode)",
    ),
    _gone("lmcache", "service-instance-id", ">=0.4.7", "0.4.6", "remove it: pdserve sets instance-id, its new name"),
    *_new("lmcache", "<=0.5.4", "0.5.5", "enable-dedup-content isolated-ipc transport"),
    *_new(
        "lmcache",
        "<=0.5.5",
        "0.5.6",
        "disable-grpc-metrics enable-blend-reorder grpc-server-workers l1-manager l1-use-hugepages null-block-id "
        "run-script-api-enabled session-ttl-seconds",
    ),
)
