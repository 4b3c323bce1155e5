"""The one table of combinations that are known not to work, by the versions of vllm, lmcache and mooncake.

A defect that a patch of ours removes is in patches/registry.py, a flag that came or went in flags.py; facts.py has all
of them as one list. A range was read in the sources of the releases, or tried.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from packaging.version import InvalidVersion

from pdserve.installed.versions import Versions
from pdserve.patches.patch import in_range


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


def affected(package: str, text: str, versions: Versions) -> bool:
    """Whether the version of a package is known to be in the range: an unknown or unreadable one is not."""
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
