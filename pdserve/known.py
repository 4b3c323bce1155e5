"""Facts of each version of vllm, lmcache and mooncake: defects, flags, and with our patches one list of them.

Data. A range was read in the sources of the releases, or tried. A defect that a patch of ours removes is in
patches/registry.py.

Flags that came, went or lost their effect were read in the argument parsers of vllm 0.21.0, 0.22.1, 0.23.0, 0.24.0,
0.26.0, 0.27.1 and 0.28.0 to 0.33.0, and of lmcache 0.4.5, 0.4.6, 0.4.7 and 0.5.4 to 0.5.6. A range holds for those
releases and what is between two that agree: of 0.27.0, which was not read, nothing is claimed. The flags of one version
that are only unknown to another are a warning of recipe/rules; only what is here is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from packaging.version import InvalidVersion

from pdserve.installed.versions import Versions
from pdserve.patches.patch import in_range
from pdserve.patches.registry import REGISTRY


@dataclass(frozen=True)
class Defect:
    """A combination that is known not to work."""

    versions: Mapping[str, str]
    """Package -> range (PEP 440) that has it; all of them must hold. Empty: every version."""
    needs: frozenset[str]
    """Features (plan/versions.py) that must all be in use."""
    what: str
    source: str
    todo: str
    refuse: bool = field(default=False, kw_only=True)
    """Refused, because it is silent or never works; otherwise a warning."""


def is_affected(package: str, text: str, versions: Versions) -> bool:
    """Tell whether the version of a package is known to be in the range: an unknown or unreadable one is not."""
    version: str | None = getattr(versions, package)
    try:
        return version is not None and in_range(version, text)
    except InvalidVersion:
        return False


_GROUPS = frozenset({"several KV groups", "connector"})
_GROUPS_TODO = "use vllm >= 0.23 and lmcache >= 0.4.7 (LMCache PR 3419)"

# What groups of KV a model has is in its config.json: plan/model_rules.py asks for these.
STATE_NOT_LOADED = Defect(
    {"vllm": "<0.23"},
    frozenset({"recurrent state", "connector"}),
    "cannot load the recurrent state of this model from a connector: its scheduler asserts, and the engine dies at the "
    "first hit",
    "vllm#42554",
    "use vllm >= 0.23",
    refuse=True,
)
STATE_STORED_WRONG = Defect(
    {"lmcache": "<0.5.6"},
    frozenset({"recurrent state", "LMCacheMPConnector"}),
    "this lmcache stores wrong recurrent state beside MTP drafts, and wrong KV where the attention backend has smaller "
    "blocks than vLLM",
    "lmcache#4984, lmcache#4247",
    "use lmcache >= 0.5.6",
)
ONE_GROUP_IN_VLLM = Defect(
    {"vllm": "<0.22.1"},
    _GROUPS,
    "turns its hybrid KV cache manager off for every connector: KV of several groups would be kept in full, or not at "
    "all",
    "seen with vllm 0.21.0",
    _GROUPS_TODO,
    refuse=True,
)
ONE_GROUP_IN_LMCACHE = Defect(
    {"lmcache": "<0.4.7"},
    frozenset({"several KV groups", "LMCacheMPConnector"}),
    "its connector knows one KV group only",
    "LMCache PR 3419",
    _GROUPS_TODO,
    refuse=True,
)
DRAFTS_IN_STATE = Defect(
    {"vllm": "<0.30"},
    frozenset({"recurrent state", "connector", "role=decode", "speculative-config"}),
    "pads the last token of a prompt, which decode computes itself, with drafts, and gives it to the kernels of a "
    "prompt: the recurrent state of Mamba layers is then that behind the drafts, and the answer another one",
    "vllm#47466 corrected it for gated delta nets, in 0.26",
    "use vllm >= 0.30, or leave speculative-config out of decode",
    refuse=True,
)
# plan/lmcache.py warns of it, in words of its own for each setting.
HANG_ON_ROCM = Defect(
    {},
    frozenset({"platform=rocm", "transfer_mode=lmcache_driven", "events of other processes"}),
    "with lmcache_driven the start or the first reload hangs on some ROCm stacks",
    "lmcache#4419",
    "set lmcache.env.LMCACHE_ROCM_HOST_EVENTS: 1 (patch lmcache-host-events), or lmcache.transfer_mode: engine_driven",
)

DEFECTS: tuple[Defect, ...] = (
    Defect(
        {"vllm": "<0.26"},
        frozenset({"MultiConnector"}),
        "MultiConnector gives a child that did not win the load empty blocks: its second child stores nothing",
        "vllm#46865",
        "use vllm >= 0.26, or a single connector",
        refuse=True,
    ),
    Defect(
        {"vllm": "<0.28"},
        frozenset({"MooncakeStoreConnector"}),
        "a Mooncake store is written from blocks that a preempted request has given back: under its key it keeps KV of "
        "another request, for every later prompt with that prefix; blocks are lost, too",
        "vllm#52360, vllm#51637",
        "use vllm >= 0.28, or leave mooncake-store out",
        refuse=True,
    ),
    Defect(
        {"vllm": ">=0.29"},
        frozenset({"MooncakeStoreConnector", "mooncake-store.save_decode_cache", "role=decode", "speculative-config"}),
        "decode counts drafts that pad a new request as tokens of it, and the store's assertion fails in its thread "
        "(process_tokens): blocks of that answer are not stored",
        "vllm#51805",
        "leave save_decode_cache or speculative-config out of decode",
    ),
    Defect(
        {"vllm": "<0.22.1", "lmcache": ">=0.4.7"},
        frozenset({"LMCacheMPConnector"}),
        "this lmcache's connector does not import on this vllm (KVCacheSpecKind is missing)",
        "import tried with vllm 0.21.0 and lmcache 0.5.6",
        "use vllm >= 0.26",
        refuse=True,
    ),
    Defect(
        {"lmcache": "<0.4.5"},
        frozenset({"LMCacheMPConnector"}),
        "this lmcache has no connector for its MP server",
        "lmcache 0.4.5 brought lmcache_mp_connector",
        "use lmcache >= 0.5.6",
        refuse=True,
    ),
    Defect(
        {"lmcache": "<0.5"},
        frozenset({"lmcache.per=tp-rank"}),
        "this lmcache's client knows one server only (no lmcache.mp.server_urls)",
        "lmcache 0.5.0 brought server_urls",
        "use lmcache >= 0.5.6, or lmcache.per: node",
        refuse=True,
    ),
    Defect(
        {"lmcache": "<0.5.5"},
        frozenset({"MultiConnector", "LMCacheMPConnector", "role=decode"}),
        "on decode, an LMCache child that lost the load to the transfer connector loads all the same, and the request "
        "completes twice: the scheduler's assertion kills the engine",
        "lmcache#4355",
        "use lmcache >= 0.5.6, or lmcache.on: [prefill]",
        refuse=True,
    ),
    Defect(
        {"lmcache": "<0.5.6"},
        frozenset({"LMCacheMPConnector", "transfer_mode=lmcache_driven"}),
        "blocks of a preempted request are overwritten while LMCache stores them: wrong KV under its tokens",
        "flush_inflight_stores does nothing in this mode before lmcache 0.5.6; 23 of 200 simulated workloads",
        "use lmcache >= 0.5.6",
    ),
    Defect(
        {"vllm": "!=0.32.*"},
        frozenset({"MoRIIOConnector"}),
        "MoRI-IO differs from release to release, and its limits and the parameters of its requests were read in vllm "
        "0.32 alone",
        "its classes have other code in 0.26 and 0.27",
        "use vllm 0.32, or kind: nixl or kind: mooncake",
        refuse=True,
    ),
    Defect(
        {"vllm": "<0.30"},
        frozenset({"MooncakeConnector", "role=decode"}),
        "a failed Mooncake transfer is only logged: the request waits until the proxy's deadline",
        "vllm#35943",
        "use vllm >= 0.30, or a short proxy.request_timeout_seconds",
    ),
    Defect(
        {"vllm": "<0.23"},
        frozenset({"LMCacheMPConnector"}),
        "asynchronous loads can deadlock when KV blocks run short",
        "vllm#44560",
        "use vllm >= 0.23, and never cap the load on older ones: that makes it common",
    ),
    Defect(
        {"vllm": ">=0.27,<0.30"},
        frozenset({"connector", "async-scheduling"}),
        "with a connector and overlapping steps two requests that do not fit beside each other in KV memory can "
        "preempt each other for ever",
        "vllm#49674",
        "use vllm >= 0.30, or engine.args.async-scheduling: false",
    ),
    Defect(
        {"vllm": "<0.26"},
        frozenset({"mooncake.device_name"}),
        "this vllm ignores device_name of the mooncake connector",
        "vllm 0.26 brought device_name",
        "use vllm >= 0.26",
    ),
    Defect(
        {},
        frozenset({"LMCacheMPConnector", "platform=rocm"}),
        "LMCache on ROCm must be a ROCm build: PyPI's wheel has CUDA kernels only and falls back to a CPU copy that "
        "is not ordered with the device's stream, which can store wrong KV",
        "lmcache#4870, lmcache#4419",
        "install a -rocm wheel of LMCache's releases, or build it with BUILD_WITH_HIP=1",
    ),
    Defect(
        {},
        frozenset({"MooncakeConnector", "role=decode", "accelerator", "mooncake.protocol=rdma"}),
        "when several transfers run at once over RDMA, decode was reported to have other KV than prefill (Mooncake "
        "0.3.10); with 0.3.13 that was not reproduced",
        "vllm#44238, vllm#42395",
        "let `pdserve verify` compare the output with one engine's; where it differs, use connectors of kind nixl",
    ),
    Defect(
        {"mooncake": "<0.3.12.post1"},
        frozenset({"MooncakeConnector", "mooncake.protocol=tcp"}),
        "over TCP this Mooncake reports a write as done before its bytes are there: decode reads other KV",
        "Mooncake#2850; seen with 0.3.11.post1",
        "use mooncake >= 0.3.13",
        refuse=True,
    ),
    Defect(
        {"lmcache": "<0.5.6"},
        frozenset({"LMCacheMPConnector", "lmcache.l2"}),
        "memory that a failed load from L2 was to fill can become readable: wrong KV",
        "lmcache#5032, lmcache#4991",
        "use lmcache >= 0.5.6, or leave lmcache.l2 out",
    ),
    Defect(
        {},
        frozenset({"LMCacheMPConnector", "lmcache.l2"}),
        "memory that a load from L2 writes to, or a store to L2 reads, is given to others when its lease ends before",
        "lmcache#5263",
        "let lmcache.l1_write_ttl_seconds and lmcache.l1_read_ttl_seconds be far above the slowest transfer of L2",
    ),
    STATE_NOT_LOADED,
    STATE_STORED_WRONG,
    ONE_GROUP_IN_VLLM,
    ONE_GROUP_IN_LMCACHE,
    DRAFTS_IN_STATE,
    HANG_ON_ROCM,
)


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


Kind = Literal["defect, refused", "defect, warned of", "defect, patched", "flag, refused", "flag, warned of"]


@dataclass(frozen=True)
class Fact:
    """A fact of some versions."""

    kind: Kind
    versions: Mapping[str, str]
    """Package -> range (PEP 440); all must hold. Empty: every version that was read."""
    needs: tuple[str, ...]
    """What must be in use for it to matter."""
    what: str
    source: str
    todo: str

    def holds(self, versions: Versions) -> bool:
        """Tell whether these versions are known to have it."""
        return all(is_affected(package, text, versions) for package, text in self.versions.items())


def facts() -> Iterator[Fact]:
    """Yield all facts that are known of versions: what is refused first."""
    for defect in sorted(DEFECTS, key=lambda each: not each.refuse):
        yield Fact(
            "defect, refused" if defect.refuse else "defect, warned of",
            defect.versions,
            tuple(sorted(defect.needs)),
            defect.what,
            defect.source,
            defect.todo,
        )
    for patch in REGISTRY:
        ranges = {"vllm": patch.vllm, "lmcache": patch.lmcache}
        yield Fact(
            "defect, patched",
            {package: text for package, text in ranges.items() if text},
            tuple(sorted({*patch.connectors, *patch.settings})),
            patch.summary,
            patch.issue,
            f"nothing: the patch {patch.name} does it",
        )
    for flag in FLAGS:
        yield Fact(
            "flag, warned of" if flag.ignored else "flag, refused",
            {flag.package: flag.versions},
            (flag.name,),
            flag.what,
            "the argument parsers of the releases",
            flag.todo,
        )
