"""The policy of a pool, made from the routing settings."""

from __future__ import annotations

from random import Random, SystemRandom
from typing import get_args

from pdserve.errors import RecipeError
from pdserve.pd.config import routing as routing_settings
from pdserve.pd.config.routing import RoutingSettings, policy_of
from pdserve.pd.routing.burden import Burden
from pdserve.pd.routing.policies import Affinity, KvEvents, LeastLoaded, PowerOfTwo, PrefixAware, RoundRobin
from pdserve.pd.routing.policy import Policy
from pdserve.roles import EngineRole


def make(routing: RoutingSettings, role: EngineRole, random: Random | None = None) -> Policy:
    """Make the policy of one pool. `random`: a seeded one makes its choices repeatable. RecipeError: there is no such
    policy."""
    if random is None:
        random = Random(SystemRandom().getrandbits(64))  # noqa: S311  # spreads load, protects nothing
    burden = Burden(role, routing.load, random)
    made = _plain(policy_of(routing, role), role, burden, random)
    return made if routing.affinity is None else Affinity(made, burden)


def kv_events_of(policy: Policy) -> KvEvents | None:
    """The policy whose index a KvSubscriber must feed; None: this one reads no KV events."""
    inner = policy.inner if isinstance(policy, Affinity) else policy
    return inner if isinstance(inner, KvEvents) else None


def _plain(settings: routing_settings.Policy, role: EngineRole, burden: Burden, random: Random) -> Policy:
    match settings:
        case routing_settings.RoundRobinSettings():
            return RoundRobin(role, random)
        case routing_settings.LeastLoadedSettings():
            return LeastLoaded(burden)
        case routing_settings.PowerOfTwoSettings():
            return PowerOfTwo(burden, random)
        case routing_settings.PrefixAwareSettings():
            return PrefixAware(burden, settings)
        case routing_settings.KvEventsSettings():
            return KvEvents(burden, settings)
    # Only for who goes past the types: the proxy's configuration has been checked.
    raise RecipeError(
        f"there is no routing policy {settings!r}",
        where=f"proxy.routing.{role}",
        todo=f"write one of {', '.join(policy_names())}",
    )


def policy_names() -> tuple[str, ...]:
    """Return the policies' names in recipes."""
    union, _ = get_args(routing_settings.Policy)
    return tuple(model.model_fields["kind"].default for model in get_args(union))
