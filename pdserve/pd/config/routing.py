"""Define the `routing` part of the settings: how the worker of a request is chosen.

The policies (pd/routing) get these models themselves. What is needed for each request they read once, when they are
made: an attribute of a model costs more than one of their own.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pdserve.pd.config.settings import Count, Seconds, Settings, Share
from pdserve.roles import EngineRole

Ratio = Annotated[float, Field(ge=0, le=1)]


class RoundRobinSettings(Settings):
    """Each worker in turn."""

    kind: Literal["round_robin"] = Field(default="round_robin", description="Each worker in turn.")


class LeastLoadedSettings(Settings):
    """The worker with the least work: prompt tokens in flight on prefill, requests and KV use on decode."""

    kind: Literal["least_loaded"] = Field(default="least_loaded", description="The least loaded worker.")


class PowerOfTwoSettings(Settings):
    """The less loaded of two workers taken at random."""

    kind: Literal["power_of_two"] = Field(default="power_of_two", description="The better of two random workers.")


class PrefixAwareSettings(Settings):
    """The worker that was sent the longest prefix of this prompt with this `cache_salt`, as far as this proxy process
    remembers."""

    kind: Literal["prefix_aware"] = Field(default="prefix_aware", description="The worker that saw the prefix.")
    block_bytes: Count = Field(
        default=256,
        description="Prompts are compared in blocks of so many bytes; behind the first 4 kB, and 16 of them, in larger "
        "ones, up to an eighth of what is before them.",
    )
    max_blocks: Count = Field(
        default=65_536,
        description="Blocks remembered for each worker (0.1 kB each), at most; half of them, the least recently used, "
        "are forgotten together.",
    )
    min_match_ratio: Ratio = Field(
        default=0.3,
        description="Share of a prompt that a worker must hold to be preferred for it; below it the least loaded gets "
        "it, so that a system prompt which all share does not draw every session to one worker.",
    )


class KvEventsSettings(Settings):
    """The worker whose KV cache holds the longest prefix, exactly, by the events that engines publish."""

    kind: Literal["kv_events"] = Field(default="kv_events", description="The worker that holds the blocks.")
    max_blocks: Count = Field(
        default=131_072,
        description="Blocks remembered for each data parallel rank (0.3 kB each); more than its KV cache has.",
    )
    min_match_ratio: Ratio = Field(default=0.3, description="As for prefix_aware.")
    replay_timeout_seconds: Seconds = Field(
        default=2, description="How long an engine may be silent while it repeats events that were missed."
    )


Policy = Annotated[
    RoundRobinSettings | LeastLoadedSettings | PowerOfTwoSettings | PrefixAwareSettings | KvEventsSettings,
    Field(discriminator="kind"),
]


class LoadSettings(Settings):
    """The measure of load, by which a worker that a policy prefers is too busy to get a request."""

    kv_weight: Annotated[float, Field(ge=0)] = Field(
        default=32, description="Decode: streams that a completely full KV cache counts for; 0: only streams count."
    )
    slack_tokens: Annotated[int, Field(ge=0)] = Field(
        default=4096,
        description="Prefill: too busy with so many more prompt tokens in flight than the least loaded, beyond what "
        "holding the prompt would save.",
    )
    slack_requests: Annotated[int, Field(ge=0)] = Field(
        default=8, description="Decode: too busy above slack_ratio * streams of the least loaded + slack_requests."
    )
    slack_ratio: Annotated[float, Field(ge=1)] = Field(default=1.5, description="See slack_requests.")
    max_kv_usage: Share = Field(
        default=0.95, description="Decode: too busy from this KV use on, unless the least loaded is no better."
    )


class AffinitySettings(Settings):
    """Requests of one session go to one worker, as long as it is not too busy."""

    header: str | None = Field(
        default="x-session-id", min_length=1, description="Header that names a session; null: none does."
    )
    body_user: bool = Field(
        default=False, description="Where the header is missing, `user` of the body names the session."
    )


class ConditionalSettings(Settings):
    """Prompts that skip prefill and are computed by decode itself: those that meet one of the thresholds."""

    min_prompt_tokens: Count | None = Field(
        default=None, description="Shorter prompts skip prefill (estimated tokens); null: no prompt is too short."
    )
    max_missing_tokens: Count | None = Field(
        default=None,
        description="A prompt skips prefill when the chosen decode holds part of it and lacks at most so many tokens; "
        "null: none does. Needs prefix_aware or kv_events on decode.",
    )


class RoutingSettings(Settings):
    """The choice of the worker that gets a request, for each pool."""

    prefill: Policy = Field(default=LeastLoadedSettings(), description="Policy of the prefill pool.")
    decode: Policy = Field(default=LeastLoadedSettings(), description="Policy of the decode pool.")
    aggregated: Policy = Field(default=LeastLoadedSettings(), description="Policy of the pool of mode aggregated.")
    load: LoadSettings = Field(
        default=LoadSettings(), description="What counts as load, and when a worker is too busy."
    )
    affinity: AffinitySettings | None = Field(
        default=None, description="Sessions that stay at a worker; null: none do."
    )
    conditional: ConditionalSettings | None = Field(
        default=None, description="Prompts that skip prefill; null: all go through it."
    )


def policy_of(routing: RoutingSettings, role: EngineRole) -> Policy:
    """Return the policy of a role's pool."""
    policies: dict[EngineRole, Policy] = {
        "prefill": routing.prefill,
        "decode": routing.decode,
        "aggregated": routing.aggregated,
    }
    return policies[role]
