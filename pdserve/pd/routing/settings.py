"""What can be set about routing: plain data with defaults, mirrored by the recipe under the same names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

PolicyName = Literal["round_robin", "least_loaded", "power_of_two", "prefix_aware", "kv_events"]
Role = Literal["prefill", "decode", "aggregated"]


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """What counts as load, and when a worker that holds a prompt is too busy to get it.

    On prefill load is prompt tokens in flight; on decode it is streams plus KV use; an aggregated worker has both.
    """

    kv_weight: float = 32.0
    """Decode: streams that a completely full KV cache counts for. 0: only streams count."""
    slack_tokens: int = 4096
    """Prefill: a worker is too busy when its prompt tokens in flight exceed those of the least loaded one by more than
    this and what it would save by holding the prompt."""
    slack_requests: int = 8
    slack_ratio: float = 1.5
    """Decode: too busy above slack_ratio * (streams of the least loaded one) + slack_requests."""
    max_kv_usage: float = 0.95
    """Decode: too busy from this KV use on (0..1), unless the least loaded one is no better."""


@dataclass(frozen=True, slots=True)
class PrefixSettings:
    """prefix_aware: an approximation, from what this proxy process has itself sent to whom."""

    block_bytes: int = 256
    """Prompts are compared in blocks of this many bytes of the client's JSON; after the first 256 in blocks of 16 times
    as many."""
    max_blocks: int = 32_768
    """Remembered for each worker, the least recently used forgotten first: about 0.2 kB of memory each."""
    min_match_ratio: float = 0.3
    """Share of the prompt (0..1) that a worker must hold to be preferred for it. Below it the prompt goes to the least
    loaded: else a system prompt that all share would draw every new session to the worker that saw it first."""


@dataclass(frozen=True, slots=True)
class KvEventsSettings:
    """kv_events: exact, from what the engines say of their caches. Needs --kv-events-config on every engine."""

    max_blocks: int = 131_072
    """Remembered for each data parallel rank, oldest forgotten first: about 0.3 kB of memory each. Should exceed the
    blocks of one rank's KV cache, else what the engine still holds is not seen."""
    min_match_ratio: float = 0.3
    """As for prefix_aware."""
    replay_timeout_seconds: float = 2.0
    """How long an engine may be silent while it repeats events that were missed."""


@dataclass(frozen=True, slots=True)
class AffinitySettings:
    """Session affinity, around whatever policy a role has."""

    enabled: bool = False
    header: str = "x-session-id"
    """Names the session."""


@dataclass(frozen=True, slots=True)
class ConditionalSettings:
    """When decode computes the prompt itself. 0 switches a condition off."""

    min_prompt_tokens: int = 0
    """Prompts with fewer tokens skip prefill."""
    max_missing_tokens: int = 0
    """Prompts skip prefill when the chosen decode holds part of them and lacks at most this many tokens."""


@dataclass(frozen=True, slots=True)
class RoutingSettings:
    """All that a policy of one role needs."""

    load: LoadSettings = field(default_factory=LoadSettings)
    prefix: PrefixSettings = field(default_factory=PrefixSettings)
    kv_events: KvEventsSettings = field(default_factory=KvEventsSettings)
    affinity: AffinitySettings = field(default_factory=AffinitySettings)
