"""A policy from its name in the recipe."""

from __future__ import annotations

from random import Random, SystemRandom

from pdserve.pd.routing.affinity import Affinity
from pdserve.pd.routing.burden import Burden
from pdserve.pd.routing.kv_events import KvEvents
from pdserve.pd.routing.kv_index import KvIndex
from pdserve.pd.routing.least_loaded import LeastLoaded
from pdserve.pd.routing.policy import Policy
from pdserve.pd.routing.power_of_two import PowerOfTwo
from pdserve.pd.routing.prefix_aware import PrefixAware
from pdserve.pd.routing.round_robin import RoundRobin
from pdserve.pd.routing.settings import PolicyName, Role, RoutingSettings


def make(policy: PolicyName, role: Role, settings: RoutingSettings, random: Random | None = None) -> Policy:
    """For one pool. `random`: a seeded one makes its choices repeatable."""
    if random is None:
        random = Random(SystemRandom().getrandbits(64))  # noqa: S311  # spreads load, protects nothing
    burden = Burden(role, settings.load, random)
    made = _plain(policy, role, settings, burden, random)
    return Affinity(made, burden) if settings.affinity.enabled else made


def kv_index(policy: Policy) -> KvIndex | None:
    """What a KvSubscriber must feed for this policy."""
    inner = policy.inner if isinstance(policy, Affinity) else policy
    return inner.index if isinstance(inner, KvEvents) else None


def _plain(policy: PolicyName, role: Role, settings: RoutingSettings, burden: Burden, random: Random) -> Policy:
    if policy == "round_robin":
        return RoundRobin(role, random)
    if policy == "least_loaded":
        return LeastLoaded(burden)
    if policy == "power_of_two":
        return PowerOfTwo(burden, random)
    if policy == "prefix_aware":
        return PrefixAware(burden, settings.prefix)
    return KvEvents(burden, settings.kv_events, KvIndex(settings.kv_events.max_blocks))
