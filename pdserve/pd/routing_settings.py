"""Which worker gets a request: the `routing` part of the settings.

A policy's knobs are those of the dataclass of the same name in pd/routing/settings.py.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pdserve.pd.settings import Count, Seconds, Settings


class RoundRobin(Settings):
    """Each worker in turn."""

    kind: Literal["round_robin"] = Field(default="round_robin", description="Each worker in turn.")


class LeastLoaded(Settings):
    """The worker with the least work: prompt tokens in flight on prefill, requests and KV use on decode."""

    kind: Literal["least_loaded"] = Field(default="least_loaded", description="The least loaded worker.")


class PowerOfTwo(Settings):
    """The less loaded of two workers taken at random."""

    kind: Literal["power_of_two"] = Field(default="power_of_two", description="The better of two random workers.")


class PrefixAware(Settings):
    """The worker that was sent the longest prefix of this prompt, by a tree of what was routed."""

    kind: Literal["prefix_aware"] = Field(default="prefix_aware", description="The worker that saw the prefix.")


class KvEvents(Settings):
    """The worker whose KV cache holds the longest prefix, by the events that engines publish."""

    kind: Literal["kv_events"] = Field(default="kv_events", description="The worker that holds the blocks.")


Policy = Annotated[RoundRobin | LeastLoaded | PowerOfTwo | PrefixAware | KvEvents, Field(discriminator="kind")]


class Affinity(Settings):
    """Requests of one session go to one worker, as long as it is not much busier than the others."""

    header: str | None = Field(
        default="x-session-id", min_length=1, description="Header that names a session; null: none does."
    )
    body_user: bool = Field(
        default=False, description="Where the header is missing, `user` of the body names the session."
    )
    ttl_seconds: Seconds = Field(default=900, description="A session is forgotten after so long without a request.")


class Conditional(Settings):
    """Prompts that skip prefill and are computed by decode itself. One of the thresholds is enough."""

    min_prompt_tokens: Count | None = Field(
        default=None, description="Shorter prompts skip prefill (estimated tokens); null: no prompt is too short."
    )
    max_missing_tokens: Count | None = Field(
        default=None,
        description="Prompts of which the chosen decode lacks at most so many tokens skip prefill; null: none does.",
    )


class Routing(Settings):
    """Which worker of each pool gets a request."""

    prefill: Policy = Field(default=LeastLoaded(), description="Policy of the prefill pool.")
    decode: Policy = Field(default=LeastLoaded(), description="Policy of the decode pool.")
    aggregated: Policy = Field(default=LeastLoaded(), description="Policy of the pool of mode aggregated.")
    affinity: Affinity | None = Field(default=None, description="Sessions that stay at a worker; null: none do.")
    conditional: Conditional | None = Field(
        default=None, description="Prompts that skip prefill; null: all go through it."
    )
    on_empty_pool: Literal["fail", "aggregate"] = Field(
        default="fail",
        description="While one of the two pools has no ready worker. fail: 503 with Retry-After. aggregate: the other "
        "pool computes prompts and answers by itself.",
    )
